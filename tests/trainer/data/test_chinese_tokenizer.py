"""`EncDecTokenizer`: the ids that the class of Yuan 1.0 gives for the same vocabulary. That class gave the numbers here."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import Tokenizer, TokenizerOptions, build_tokenizer

WORDS = (
    "<pad>", "<unk>", "<eod>", "<mask>", "<s_0>", "<s_1>", "<s_2>", "<s_3>", "<s_4>", "<s_5>", "\u2582", "\u2583",
    "我们", "我", "们", "今天", "天气", "很", "好", "，", "。", "hello", "world", "play", "##ing", "##ed", "##s", "h", "##h",
    "a", "##a", "b", "##b", "1", "##1", "1.0", "源", "北京", "大学", "北京大学",
)  # fmt: skip
SENTENCE = "我们今天playing hello world。"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("jieba", reason="the extra chinese")
    return build(tmp_path_factory.mktemp("vocabulary"), WORDS)


def build(directory: Path, words: Sequence[str]) -> Tokenizer:
    file = directory / "vocab.txt"
    file.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return build_tokenizer(TokenizerOptions("EncDecTokenizer", vocab_file=file))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (SENTENCE, [12, 15, 23, 24, 21, 22, 20]),
        ("hello  world\n北京大学 a b", [21, 10, 10, 22, 11, 39, 10, 29, 31]),
        ("ab1 é 源1.0", [29, 32, 34, 1, 10, 36, 35]),
        ("z" * 201 + " a", [1, 29]),
        ("", []),
    ],
)
def test_ids_are_those_of_yuan(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.tokenize(text) == ids


def test_text_comes_back_with_its_spaces(tokenizer: Tokenizer) -> None:
    """Yuan's class leaves ## in the text: `play ##ing`."""
    ids = tokenizer.tokenize("我们今天playing hello world")
    assert tokenizer.detokenize([*ids, 2]) == "我们今天playing hello world"
    assert tokenizer.spelled([12, 2]) == "我们<eod>"
    assert tokenizer.spelled([12, 99]) == "我们<unk>"  # a row of padding


def test_a_document_ends_with_eod(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (40, 2, 0)
    assert (tokenizer.bos, tokenizer.begin) == (None, [])


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="has no <eod>; it is not a vocabulary"):
        build(tmp_path, [word for word in WORDS if word != "<eod>"])
    file = tmp_path / "vocab.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptCheckpoint, match="is not a vocabulary in UTF-8"):
        build_tokenizer(TokenizerOptions("EncDecTokenizer", vocab_file=file))


def test_jieba_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(UsageError, match=r"needs the package jieba; .*pip install '\.\[chinese\]'"):
        build(tmp_path, WORDS)
