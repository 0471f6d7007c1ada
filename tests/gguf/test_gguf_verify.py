"""A GGUF file of ours, and the fingerprints that were written beside it, which are of what is stored."""

import json
import shutil
from pathlib import Path

import pytest

import megaconv
from formats import gguf_header
from megaconv.errors import CheckpointError, CorruptCheckpoint
from tests.conftest import FIXTURES
from tests.engine.test_reading_back import FURTHER, MODELS, TYPES
from tests.families.test_families import write_model
from tests.runs import assert_refused, run

LLAMA = FIXTURES / "gguf-llama-spm" / "hf"


def written(source: Path, target: Path, kind: str, **extra: str) -> Path:
    megaconv.convert(source, target, saver="gguf", options={"gguf_type": kind, **extra})
    return target


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("source", MODELS, ids=lambda source: source.parent.name)
def test_verify_finds_an_output_as_written(source: Path, kind: str, tmp_path: Path) -> None:
    out = written(source, tmp_path / "out", kind)
    for place in (out, out / "model.gguf"):
        found = megaconv.verify(place)
        assert found.same, found.differences
        assert found.tensors > 10
    # Without a config.json, a Llama 3 can be verified but not be read.
    shutil.copy(source / "config.json", out)
    assert megaconv.inspect(out).differences == {}
    assert megaconv.inspect(out / "model.gguf").differences == {}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FURTHER)
def test_families_with_other_stored_forms_are_verified(
    family: str, kind: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "hf", family, max_position_embeddings=64, **FURTHER[family])
    out = written(source, tmp_path / "out", kind, tokenizer="none")
    found = megaconv.verify(out)
    assert found.same, found.differences


def test_a_second_gguf_file_is_not_passed_over(tmp_path: Path) -> None:
    """A conversion of this directory is refused, so verify must not say that all is as written."""
    out = written(LLAMA, tmp_path / "out", "bf16")
    shutil.copy(out / "model.gguf", out / "model-1.gguf")
    assert_refused(run("verify", out), 3, "has 2 GGUF files", "model-1.gguf")


@pytest.mark.parametrize("kind", TYPES)
def test_a_flipped_bit_in_any_tensor_is_found_and_the_tensor_named(
    kind: str, tmp_path: Path
) -> None:
    out = written(LLAMA, tmp_path / "out", kind)
    file = out / "model.gguf"
    stored = gguf_header.read(file).tensors
    for name in (
        "token_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.0.attn_q.weight",
        "output.weight",
    ):
        flip(file, stored[name].offset + stored[name].nbytes // 2)
        found = megaconv.verify(out)
        assert not found.same, name
        assert list(found.differences.values()) == ["changed"]
        with pytest.raises(CorruptCheckpoint, match="with other values than were written"):
            megaconv.convert(out, tmp_path / "hf", saver="hf")
        flip(file, stored[name].offset + stored[name].nbytes // 2)
    assert megaconv.verify(out).same
    assert not (tmp_path / "hf").exists()


def test_a_flipped_bit_in_the_metadata_is_found(tmp_path: Path) -> None:
    """No tensor shows it: a word of the vocabulary, the base of the positions, the factors of the frequencies."""
    out = written(LLAMA, tmp_path / "out", "q8_0")
    file = out / "model.gguf"
    content = file.read_bytes()
    for place in (
        content.index(b"llama.rope.freq_base") + 24,
        content.index(b"tokenizer.ggml.tokens") + 60,
    ):
        flip(file, place)
        refusals = 0
        try:
            found = megaconv.verify(out)
            assert found.differences == {"model.gguf": "changed"}
            assert megaconv.inspect(out).differences == {"model.gguf": "changed"}
        except CheckpointError:
            refusals += 1
        with pytest.raises(CheckpointError):
            megaconv.convert(out, tmp_path / "hf", saver="hf")
        flip(file, place)
    assert megaconv.verify(out).same


def test_a_source_that_was_changed_is_taken_as_it_is_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    out = written(LLAMA, tmp_path / "out", "q8_0")
    stored = gguf_header.read(out / "model.gguf").tensors["blk.0.attn_q.weight"]
    flip(out / "model.gguf", stored.offset + 5)
    assert run("verify", out).status == 4
    assert run("convert", out, tmp_path / "hf", "--saver", "hf", "--no-check-source").status == 0


def test_a_record_without_descriptions_is_compared_by_its_tensors(tmp_path: Path) -> None:
    out = written(LLAMA, tmp_path / "out", "bf16")
    record = json.loads((out / "megaconv.json").read_text())
    del record["descriptions"]
    (out / "megaconv.json").write_text(json.dumps(record))
    assert megaconv.verify(out).same
