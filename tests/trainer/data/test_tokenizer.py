"""Tokenizers give the ids of megatron-core's classes for the same files."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CheckpointError, CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, TokenizerOptions, build_tokenizer
from tests.trainer.data.megatron_tokenizers import build, null_tokenizer
from tests.trainer.data.vocabularies import TEXTS, bert_vocabulary, gpt2_files, sentencepiece_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    vocab, merges = gpt2_files(root / "gpt2")
    return {
        "vocab": vocab, "merges": merges, "bert": bert_vocabulary(root / "bert"),
        "sentencepiece": sentencepiece_model(root / "tokenizer.model"),
        "with_pad": sentencepiece_model(root / "padded.model", pad=3),
    }  # fmt: skip


def options(kind: str, files: dict[str, Path]) -> TokenizerOptions:
    if kind == "GPT2BPETokenizer":
        return TokenizerOptions(kind, vocab_file=files["vocab"], merge_file=files["merges"])
    if kind == "BertWordPieceLowerCase":
        return TokenizerOptions(kind, vocab_file=files["bert"])
    if kind == "HuggingFaceTokenizer":
        return TokenizerOptions(kind, model=str(files["vocab"].parent))
    if kind == "NullTokenizer":
        return TokenizerOptions(kind, vocab_size=100)
    return TokenizerOptions(
        kind, model=str(files["with_pad" if kind == "SentencePieceTokenizer" else "sentencepiece"])
    )


def megatron(options: TokenizerOptions, monkeypatch: pytest.MonkeyPatch) -> Any:
    """megatron-core's tokenizer for the same flags; the names that it would look up on the Hub become our directories."""
    from megatron.core.tokenizers.text.libraries import megatron_hf_tokenizer

    if options.vocab_file:
        entry = {"tokenizer_name": str(options.vocab_file.parent)}
        monkeypatch.setitem(megatron_hf_tokenizer.MEGATRON_CONFIG_MAP, options.type, entry)
    return build(options)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        "GPT2BPETokenizer",
        "BertWordPieceLowerCase",
        "HuggingFaceTokenizer",
        "Llama2Tokenizer",
        "SentencePieceTokenizer",
    ],
)
def test_ids_are_those_of_megatron_core(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(kind, files)
    ours, theirs = build_tokenizer(given), megatron(given, monkeypatch)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.eod == theirs.eod
    assert (ours.pad, ours.bos) == tuple(
        None if number == -1 else number for number in (theirs.pad, theirs.bos)
    )
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text), text
        if kind in ("GPT2BPETokenizer", "HuggingFaceTokenizer") and "<|" not in text:
            assert ours.detokenize(ours.tokenize(text)) == text
        elif kind == "SentencePieceTokenizer":
            ids = ours.tokenize(text)
            assert ours.detokenize(ids) == theirs.detokenize(ids)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_numbers_are_those_of_megatron_core() -> None:
    given = TokenizerOptions("NullTokenizer", vocab_size=100)
    ours, theirs = build_tokenizer(given), null_tokenizer(100)
    assert ours.tokenize("3 1 99") == theirs.tokenize("3 1 99") == [3, 1, 99]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (101, 100)
    assert ours.detokenize([3, 1]) == "3 1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TokenizerOptions("WordTokenizer"), "there are GPT2BPETokenizer"),
        (TokenizerOptions("NullTokenizer"), "needs --vocab-size"),
        (TokenizerOptions("Llama2Tokenizer"), "needs --tokenizer-model"),
        (TokenizerOptions("GPT2BPETokenizer"), "needs --vocab-file"),
        (
            TokenizerOptions("GPT2BPETokenizer", vocab_file=Path("none.json")),
            "none.json: no such file",
        ),
        (TokenizerOptions("Llama2Tokenizer", model="none.model"), "none.model: no such file"),
        (
            TokenizerOptions("HuggingFaceTokenizer", model="none"),
            "none: no such file.*can't be fetched from the Hugging",
        ),
        (
            TokenizerOptions("HuggingFaceTokenizer", model="./none"),
            "none: no such file or directory",
        ),
    ],
    ids=lambda value: getattr(value, "type", value),
)
def test_missing_tokenizer_settings_are_reported(given: TokenizerOptions, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_tokenizer(given)


@pytest.mark.oracle
def test_a_megatron_checkpoint_has_the_tokenizer_in_hf(
    files: dict[str, Path], tmp_path: Path
) -> None:
    wanted = build_tokenizer(options("HuggingFaceTokenizer", files)).tokenize("The fox")
    (tmp_path / "hf").mkdir()
    empty = TokenizerOptions("HuggingFaceTokenizer", model=str(tmp_path))
    with pytest.raises(CorruptCheckpoint, match=r"has no tokenizer .*; name the directory"):
        build_tokenizer(empty)
    shutil.copytree(files["vocab"].parent, tmp_path / "hf", dirs_exist_ok=True)
    assert build_tokenizer(empty).tokenize("The fox") == wanted
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "best_checkpointed_iteration.txt").write_text("2")
    for name in ("iter_0000002", "best"):
        one = TokenizerOptions("HuggingFaceTokenizer", model=str(tmp_path / name))
        assert build_tokenizer(one).tokenize("The fox") == wanted


@pytest.mark.oracle
def test_a_tokenizer_json_stands_for_the_directory_with_all_that_belongs_to_it(
    tmp_path: Path,
) -> None:
    gpt2_files(tmp_path / "model")
    HuggingFaceTokenizer(str(tmp_path / "model")).save(str(tmp_path / "saved"))
    found = build_tokenizer(
        TokenizerOptions("HuggingFaceTokenizer", str(tmp_path / "saved" / "tokenizer.json"))
    )
    assert found.eod is not None


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "BertWordPieceLowerCase", "Llama2Tokenizer"])
def test_files_that_are_no_tokenizer_are_reported(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    file.write_text("neither\nof them\n")
    with pytest.raises(CorruptCheckpoint, match=str(file)):
        build_tokenizer(TokenizerOptions(kind, str(file), file, file))


def test_a_token_behind_the_vocabulary_has_no_text(files: dict[str, Path]) -> None:
    """A model's vocabulary may be padded, so that it writes such tokens."""
    for kind in ("GPT2BPETokenizer", "BertWordPieceLowerCase", "Llama2Tokenizer"):
        built = build_tokenizer(options(kind, files))
        ids = built.tokenize("the dog")
        assert built.detokenize([*ids, built.vocab_size]) == built.detokenize(ids)
        assert built.spelled([*ids, built.vocab_size]) == built.spelled(ids)


def test_half_a_surrogate_pair_is_refused_alike(files: dict[str, Path]) -> None:
    for kind in ("GPT2BPETokenizer", "BertWordPieceLowerCase", "Llama2Tokenizer"):
        built = build_tokenizer(options(kind, files))
        with pytest.raises((ValueError, TypeError)):
            built.tokenize("bad \ud800")


def test_a_vocabulary_of_bert_has_a_word_a_line(tmp_path: Path) -> None:
    """U+2028 and U+0085 are words of some vocabularies, and no line ends in transformers."""
    file = tmp_path / "vocab.txt"
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "\u2028", "\x85", "b")
    file.write_text("\n".join(words) + "\n", encoding="utf-8", newline="")
    built = build_tokenizer(TokenizerOptions("BertWordPieceLowerCase", vocab_file=file))
    assert built.vocab_size == len(words)
    assert built.tokenize("a b") == [5, 8]


def test_a_vocabulary_of_bert_that_is_not_utf_8_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_bytes(b"[PAD]\n\xe9\n")
    with pytest.raises(CorruptCheckpoint, match=r"vocab.txt: is not a vocabulary in UTF-8"):
        build_tokenizer(TokenizerOptions("BertWordPieceLowerCase", vocab_file=file))


@pytest.mark.parametrize(
    ("kind", "module"),
    [("Llama2Tokenizer", "sentencepiece"), ("HuggingFaceTokenizer", "transformers")],
)
def test_a_missing_package_is_reported_with_what_to_install(
    files: dict[str, Path], kind: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UsageError, match=rf"package {module}; in a clone of megaconv: pip install '\.\[data\]'"
    ):
        build_tokenizer(options(kind, files))
