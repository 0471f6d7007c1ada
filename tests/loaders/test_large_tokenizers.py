"""Tokenizers of the largest published sizes pass everywhere: as files that travel, in GGUF, in scan, in the trainer."""

import json
from functools import partial
from pathlib import Path

import pytest

import megaconv
from formats import ceilings, gguf_header
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.large_tokenizers import SIZES, Size, write_byte_level, write_with_sentencepiece
from tests.models import write_llama

SLOW = partial(pytest.param, marks=pytest.mark.slow)
# Of the largest sizes seconds each, most of them to make the tokenizer.
BYTE_LEVEL = [
    "a quarter of Llama 3",
    *map(SLOW, ("Llama 3", "Llama 3, merges as texts", "Qwen 3.5")),
]


def model(directory: Path, size: Size) -> Path:
    """A model of as many words, but for its tokenizer."""
    return write_llama(
        directory / "source", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=size.words
    )


def require_sound(source: Path, core: Path) -> None:
    assert megaconv.inspect(source).header.parameters == megaconv.inspect(core).header.parameters
    assert not megaconv.scan(source).faults
    assert not megaconv.scan(core).faults
    assert megaconv.verify(core).same


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_tokenizer_of_the_largest_size_passes_through_every_command(
    name: str, tmp_path: Path
) -> None:
    source = model(tmp_path, SIZES[name])
    tokenizer = write_byte_level(source, SIZES[name])
    core, gguf = tmp_path / "core", tmp_path / "gguf"
    megaconv.convert(source, core, saver="core")
    assert (core / "hf" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    require_sound(source, core)
    megaconv.convert(core, gguf, saver="gguf")
    lengths = gguf_header.read(gguf / "model.gguf").lengths
    assert lengths["tokenizer.ggml.tokens"] == SIZES[name].words
    assert lengths["tokenizer.ggml.merges"] == SIZES[name].merges


@pytest.mark.slow
def test_a_tokenizer_of_gemmas_size_passes_through_every_command(tmp_path: Path) -> None:
    size = SIZES["Gemma 3"]
    source = model(tmp_path, size)
    tokenizer = write_with_sentencepiece(source, size)
    core, gguf = tmp_path / "core", tmp_path / "gguf"
    megaconv.convert(source, core, saver="core")
    assert (core / "hf" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    require_sound(source, core)
    megaconv.convert(core, gguf, saver="gguf")
    assert gguf_header.read(gguf / "model.gguf").lengths["tokenizer.ggml.tokens"] == size.words


@pytest.mark.parametrize("name", [SLOW("Llama 3"), SLOW("Gemma 3")])
def test_the_trainer_reads_a_tokenizer_of_the_largest_size(name: str, tmp_path: Path) -> None:
    size = SIZES[name]
    pytest.importorskip("transformers")
    write = write_with_sentencepiece if name == "Gemma 3" else write_byte_level
    tokenizer = write(tmp_path, size)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.model").unlink(missing_ok=True)
    found = HuggingFaceTokenizer(str(tmp_path))
    assert found.vocab_size == size.words
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    longest = max((token for token in vocabulary if token.isalpha()), key=len)
    assert found.inner.convert_tokens_to_ids(longest) == vocabulary[longest]


def test_a_tokenizer_four_times_the_largest_is_within_its_ceilings(tmp_path: Path) -> None:
    """The largest published one, Gemma's, has 33 MB with 514,906 merges as lists; here a sample of one is multiplied."""
    sample = Size(12_800, 25_700, 312)
    content = write_byte_level(tmp_path, sample).read_bytes()
    per_token = len(content) / sample.tokens
    assert 4 * 262_144 * per_token < ceilings.SIDECAR_BYTES
    separators = sum(content.count(separator) for separator in (b"[", b"{", b":", b","))
    compact = json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False).encode()
    assert separators < len(compact) / ceilings.JSON_VALUE_BYTES
