"""Answers of OpenAI's routes: log-probabilities of tokens that have the same text; and to whom an opened server answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.inference.sampling import Likelihood
from megatron_lite.inference.server.openai_answers import Form
from megatron_lite.inference.server.pieces import Choice, Piece, Pieces
from megatron_lite.inference.text import Detokenize, continuation
from tests.trainer.inference.forced import answered, byte_tokenizer

TEXTS = {
    1: "a",
    2: "\N{REPLACEMENT CHARACTER}",
    3: "\N{REPLACEMENT CHARACTER}",
    4: "",
    5: "",
    6: "b",
}


def form(*, chat: bool) -> Form:
    return Form(
        chat,
        "tiny",
        lambda ids: "".join(TEXTS[token] for token in ids),
        log_probs=True,
        continued=((),),
    )


def logprobs(likelihood: Likelihood, token: int, *, chat: bool) -> Any:
    choice = Choice("", [(token, likelihood)])
    return form(chat=chat).answer([choice])["choices"][0]["logprobs"]


def test_tokens_with_equal_text_stay_separate_and_the_chosen_one_has_its_text() -> None:
    likeliest = ((2, -0.5), (4, -1.0), (5, -1.5), (3, -2.0))
    for chosen, value in ((3, -2.0), (6, -9.0)):
        found = logprobs(Likelihood(value, likeliest), chosen, chat=False)
        (top,) = found["top_logprobs"]
        assert sorted(top.values()) == sorted({*(each for _, each in likeliest), value})
        assert found["tokens"] == [TEXTS[chosen]]
        assert top[TEXTS[chosen]] == value
        assert top["token_id:5"] == -1.5
    assert list(top) == ["\N{REPLACEMENT CHARACTER}", "", "token_id:5", "token_id:3", "b"]


def test_in_chats_every_entry_has_a_token_of_its_own_and_no_bytes_that_it_does_not_have() -> None:
    likelihood = Likelihood(-2.0, ((2, -0.5), (1, -1.0), (3, -2.0)))
    (found,) = logprobs(likelihood, 3, chat=True)["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == (
        "\N{REPLACEMENT CHARACTER}",
        -2.0,
        None,
    )
    assert [(each["token"], each["bytes"]) for each in found["top_logprobs"]] == [
        ("token_id:2", None), ("a", [97]), ("\N{REPLACEMENT CHARACTER}", None),
    ]  # fmt: skip


def of_words(ids: Sequence[int]) -> str:
    """Words with a space before each but the first, as Llama 2's tokenizer gives them."""
    return " ".join(map(str, ids))


def of_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("detokenize", "before", "tokens", "offsets"),
    [
        (of_words, (5, 6), (7, 8, 9), [0, 2, 4]),
        (of_words, (), (5, 6, 7), [0, 1, 3]),
        (of_bytes, b"a", "é日b".encode(), [0, 0, 1, 1, 1, 2]),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_offsets_are_places_in_the_text_in_streams_too(
    detokenize: Detokenize,
    before: Sequence[int],
    tokens: Sequence[int],
    offsets: list[int],
    *,
    held: bool,
) -> None:
    """held: whether the text comes with the last token, because it may be the beginning of a stop word."""
    made = Form(chat=False, model="tiny", detokenize=detokenize, log_probs=True, continued=[before])
    text = continuation(detokenize, before, tokens)

    async def pieces() -> Pieces:
        for number, token in enumerate(tokens):
            is_last = number == len(tokens) - 1
            own = text[offsets[number] : [*offsets, len(text)][number + 1]]
            late = text if is_last else ""
            shown = late if held else own
            yield Piece(0, shown, ((token, Likelihood(-1.0)),), "stop" if is_last else None)

    async def asked() -> list[Any]:
        whole = await made.whole(pieces())
        return [[whole], [chunk async for chunk in made.events(pieces())]]

    for chunks in asyncio.run(asked()):
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == text
        found = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
        assert found == offsets


@pytest.mark.parametrize(
    ("local_name", "status"), [(None, 200), ("127.0.0.1", 403), ("box.example", 200)]
)
def test_a_server_that_is_opened_answers_to_every_name(local_name: str | None, status: int) -> None:
    """`--host 0.0.0.0` opens it; a name of this machine that is its own is heard, too."""
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    from megatron_lite.inference.server.app import Limits, Server

    worker: Any = SimpleNamespace(without_answer=0)
    opened: Any = SimpleNamespace()
    app = Server(opened, worker, "tiny", Limits(100, 1.0), local_name=local_name).app()
    headers = [(b"host", b"BOX.example:8000")]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "raw_path": b"/health",
        "query_string": b"",
        "headers": headers,
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
    ],
)
def test_addresses_that_others_reach_open_the_server(address: str, alone: bool) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    from megatron_lite.inference.server.local_only import is_loopback

    assert is_loopback(address) == alone


def test_a_stop_word_in_the_last_character_is_the_reason_for_the_end(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path, ["</s>"], template)
    # The replacement character may be the beginning of another one, so it is held back up to the end.
    said = "a\N{REPLACEMENT CHARACTER}"
    fields = {"stop": ["\N{REPLACEMENT CHARACTER}"], "max_tokens": len(said.encode())}
    (found,) = answered(tokenizer, [said], fields)
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")
