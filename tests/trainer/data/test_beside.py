"""A checkpoint's own tokenizer is found whichever of its files lie beside the weights."""

import json
import shutil
from pathlib import Path

import pytest

from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.checkpoint.sidecars import sidecars, tokenizer_files
from megatron_lite.data.beside import tokenizer_beside, tokenizer_of
from megatron_lite.data.tokenizer import (
    BERT_TYPES,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerOptions,
    build_tokenizer,
)
from megatron_lite.settings.learning import Data
from tests.conftest import FIXTURES
from tests.trainer.data.vocabularies import TEXTS, bert_vocabulary, gpt2_files, sentencepiece_model

LLAMA = Path(__file__).parents[2] / "fixtures" / "gguf-llama-spm" / "hf"


def beside(directory: Path) -> Tokenizer | None:
    return tokenizer_beside({path.name: path for path in directory.iterdir()})


def test_a_sentencepiece_model_alone_divides_texts_as_sentencepiece_does(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece_model(tmp_path / "tokenizer.model")
    # From this file alone, transformers would guess a wrong tokenizer.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = beside(tmp_path)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert found is not None
    assert found.begin == [expected.bos_id()]
    assert [found.tokenize(text) for text in TEXTS] == [
        expected.encode_as_ids(text) for text in TEXTS
    ]


@pytest.mark.oracle
def test_a_sentencepiece_model_with_its_configuration_is_transformers_with_its_template(
    tmp_path: Path,
) -> None:
    shutil.copy(LLAMA / "tokenizer.model", tmp_path)
    settings = json.loads((LLAMA / "tokenizer_config.json").read_text()) | {
        "chat_template": "{{ messages }}"
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = beside(tmp_path)
    assert isinstance(found, HuggingFaceTokenizer)
    assert found.inner.chat_template == "{{ messages }}"
    assert found.tokenize("a</s>")[-1] == found.eod


@pytest.mark.oracle
def test_sentencepiece_replaces_a_tokenizer_that_transformers_misreads(
    tmp_path: Path,
) -> None:
    shutil.copy(LLAMA / "tokenizer.model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    theirs = HuggingFaceTokenizer(str(tmp_path)).tokenize("Hello world")
    own = build_tokenizer(
        TokenizerOptions("Llama2Tokenizer", str(tmp_path / "tokenizer.model"))
    ).tokenize("Hello world")
    found = beside(tmp_path)
    assert found is not None
    assert found.tokenize("Hello world") == own != theirs


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("model_type", "kind"), [("gpt2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")]
)
def test_a_vocabulary_and_merges_are_read_as_the_models_class_reads_them(
    tmp_path: Path, model_type: str, kind: str
) -> None:
    gpt2_files(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = beside(tmp_path / "model")
    assert isinstance(found, HuggingFaceTokenizer)
    assert type(found.inner).__name__ == kind


@pytest.mark.parametrize("config", [None, "llama"])
def test_a_vocabulary_and_merges_that_no_class_claims_are_gpt2s(
    tmp_path: Path, config: str | None
) -> None:
    vocab, merges = gpt2_files(tmp_path / "model")
    (vocab.parent / "config.json").unlink()
    if config:
        (vocab.parent / "config.json").write_text(json.dumps({"model_type": config}))
    found = beside(vocab.parent)
    expected = build_tokenizer(
        TokenizerOptions("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    )
    assert found is not None
    assert [found.tokenize(text) for text in TEXTS] == [expected.tokenize(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.model", "IQ== 0\nIg== 1\n"), ("tekken.json", "{}")]
)
def test_a_tokenizer_that_can_not_be_read_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{name}: .*--tokenizer-model gives another one"):
        beside(tmp_path)


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert beside(tmp_path) is None


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama-spm", "gpt2-bpe", "qwen2-bpe"])
def test_the_tokenizer_inside_a_gguf_file_is_that_of_the_original_and_is_saved_with_a_run(
    name: str, tmp_path: Path
) -> None:
    start = open_weights(str(FIXTURES / f"gguf-{name}" / f"{name}-bf16.gguf"))
    original = HuggingFaceTokenizer(str(FIXTURES / f"gguf-{name}" / "hf"))
    found = tokenizer_of(start.header)
    assert found is not None
    expected = [original.tokenize(text) for text in TEXTS]
    assert [found.tokenize(text) for text in TEXTS] == expected
    files = sidecars(Data(), found, start.config, {}, start.files, start.header.made)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    saved = HuggingFaceTokenizer(str(tmp_path))
    assert [saved.tokenize(text) for text in TEXTS] == expected


@pytest.mark.oracle
@pytest.mark.parametrize("kind", BERT_TYPES)
def test_a_saved_vocabulary_of_bert_says_whether_texts_become_lower_case(
    kind: str, tmp_path: Path
) -> None:
    vocabulary = bert_vocabulary(tmp_path / "bert")
    own = build_tokenizer(TokenizerOptions(kind, vocab_file=vocabulary))
    data = Data(tokenizer_type=kind, vocab_file=str(vocabulary))
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, content in tokenizer_files(data, own).items():
        (saved / name).write_bytes(content)
    found = beside(saved)
    assert found is not None
    assert [found.tokenize(text) for text in TEXTS] == [own.tokenize(text) for text in TEXTS]
    assert (found.eod, found.pad) == (own.eod, own.pad)
