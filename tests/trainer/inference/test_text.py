"""Text that is given bit by bit is the text of all tokens, up to a stop word."""

from collections.abc import Sequence

import pytest
from tokenizers.decoders import ByteFallback

from megatron_lite.inference.text import Detokenize, TextStream, continuation


def of_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🙂!", "🙂🙂", ""])
def test_pieces_join_to_the_whole(text: str) -> None:
    stream = TextStream(of_bytes)
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert "�" not in "".join(pieces)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    stream = TextStream(of_bytes)
    assert [stream.add(byte) for byte in "a🙂".encode()[:3]] == ["a", "", ""]
    assert stream.finish() == "�"


def of_byte_tokens(ids: Sequence[int]) -> str:
    """The byte tokens of Llama 2's tokenizer: each byte of an incomplete sequence is a character of its own."""
    return str(ByteFallback().decode([f"<0x{byte:02X}>" for byte in ids]))


@pytest.mark.parametrize("detokenize", [of_bytes, of_byte_tokens])
@pytest.mark.parametrize("prompt", ["", "a", "日本語の長い文章です"])
@pytest.mark.parametrize("character", ["é", "語", "🙂"])
@pytest.mark.parametrize("answer", ["", " bcd", "🙂", " 語 b"])
def test_a_character_that_begins_in_the_prompt_is_shown_whole(
    detokenize: Detokenize, prompt: str, character: str, answer: str
) -> None:
    start, encoded = prompt.encode(), character.encode()
    for split in range(1, len(encoded)):
        ids = (*start, *encoded[:split]), (*encoded[split:], *answer.encode())
        assert continuation(detokenize, *ids) == character + answer


def test_a_partial_character_of_the_prompt_is_not_repeated() -> None:
    """Neither one that the answer doesn't complete, nor the replacement character itself."""
    assert continuation(of_bytes, b"a\xc3", b" bc") == " bc"
    assert continuation(of_bytes, "a�".encode(), b" bc") == " bc"


def of_pairs(ids: Sequence[int]) -> str:
    """Tokens of two bytes each, as byte-level vocabularies have them: a token may end one character and start the next."""
    return b"".join(number.to_bytes(2, "big") for number in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["日本", "a日本語のbc長い文章です", "日本語" * 12])
def test_a_prompt_that_ends_inside_a_token_of_two_characters_loses_none(text: str) -> None:
    encoded = text.encode()
    encoded += b"." * (len(encoded) % 2)
    ids = [int.from_bytes(encoded[place : place + 2], "big") for place in range(0, len(encoded), 2)]
    for split in range(1, len(ids)):
        given = encoded[: 2 * split].decode(errors="ignore")
        assert given + continuation(of_pairs, ids[:split], ids[split:]) == encoded.decode()


@pytest.mark.parametrize("detokenize", [of_bytes, of_byte_tokens])
@pytest.mark.parametrize(
    "text", ["�literal", "a�日", "��", "日�b��語", "words of a prompt � 日本��"]
)
def test_a_replacement_character_that_the_text_holds_is_a_character(
    detokenize: Detokenize, text: str
) -> None:
    encoded = text.encode()
    for split in range(1, len(encoded)):
        given = encoded[:split].decode(errors="ignore")
        assert given + continuation(detokenize, encoded[:split], encoded[split:]) == text


SPECIAL = 256
"""A token without text."""


@pytest.mark.parametrize("before", [b"", b"a prompt \xe6\x97"])
@pytest.mark.parametrize(
    ("token", "shown"), [(SPECIAL, ""), (0xFF, "�")], ids=["no text", "no character"]
)
def test_many_tokens_without_a_character_are_decoded_in_short_runs(
    before: bytes, token: int, shown: str
) -> None:
    """A model that is lost may repeat such a token up to the longest answer."""
    decoded: list[int] = []

    def detokenize(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return of_bytes([each for each in ids if each != SPECIAL])

    count = 1000
    answer = [*[token] * count, *" 日b".encode()]
    text = continuation(detokenize, before, answer)
    assert text.lstrip("�") == " 日b"
    assert text.count("�") == count * len(shown)
    assert max(decoded) < 200


def of_words(ids: Sequence[int]) -> str:
    """Words with a space before each but the first, as Llama 2's tokenizer gives them."""
    return " ".join(map(str, ids))


def test_a_text_that_continues_another_begins_with_its_space() -> None:
    stream = TextStream(of_words, after=(5, 6))
    assert [stream.add(token) for token in (7, 8)] == [" 7", " 8"]
    assert continuation(of_words, (5, 6), (7, 8)) == " 7 8"
    assert continuation(of_words, (), (7, 8)) == "7 8"
    many = range(100)
    assert continuation(of_words, many, (7,)) == " 7"


@pytest.mark.parametrize(
    ("text", "stop", "given"),
    [
        ("one\nUser: two", ["\nUser:"], "one"),
        ("one\nUse two", ["\nUser:"], "one\nUse two"),
        ("aaab", ["aab"], "a"),
        ("xyz end", ["end", "z"], "xy"),
        ("ends ab", ["abc"], "ends ab"),
    ],
)
def test_a_stop_word_and_what_follows_are_never_given(
    text: str, stop: list[str], given: str
) -> None:
    stream, pieces = TextStream(of_bytes, stop), []
    for byte in text.encode():
        pieces.append(stream.add(byte))
        assert given.startswith("".join(pieces))
        if stream.stopped:
            break
    assert "".join(pieces) + stream.finish() == given
    assert stream.stopped == (given != text)
