"""GGUF read: files that llama.cpp's own converter made, against the models that it made them of."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats import gguf_header
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.preparation import open_source
from megaconv.options import LoadOptions
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

CASES = sorted(FIXTURES.glob("gguf-*/*.gguf"))
PLAIN = [case for case in CASES if "q8_0" not in case.name]
QUANTIZED = [case for case in CASES if "q8_0" in case.name]
LLAMA = FIXTURES / "gguf-llama-spm"


def original(case: Path) -> Path:
    here = case.parent / "hf"
    return here if here.is_dir() else LLAMA / "hf"


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.parent.name)
def test_the_model_that_llama_cpp_converted_comes_back_bit_for_bit(case: Path) -> None:
    _, source = open_source(case, options=LoadOptions(config=original(case)))
    _, expected = open_source(original(case))
    assert source.header.manifest == expected.header.manifest
    assert fingerprint_source(source, 1).weights == megaconv.fingerprint(original(case)).weights


@pytest.mark.parametrize("case", QUANTIZED, ids=lambda case: case.parent.name)
def test_blocks_of_q8_0_are_multiplied_out(case: Path, tmp_path: Path) -> None:
    """By independent arithmetic, for a tensor whose rows lie as the model's do; the others are close to the original."""
    outcome = run("convert", case, tmp_path / "out", "--saver", "hf", "--config", original(case), "--dtype", "fp32")
    assert outcome.status == 0, outcome.err
    found, expected = load_file(tmp_path / "out/model.safetensors"), load_file(original(case) / "model.safetensors")
    assert found.keys() == expected.keys()
    embedding = next(name for name in found if name.endswith(("embed_tokens.weight", "wte.weight")))
    stored = gguf_header.read(case).tensors["token_embd.weight"]
    blocks = np.frombuffer(case.read_bytes()[stored.offset : stored.offset + stored.nbytes], np.uint8).reshape(-1, 34)
    values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].copy().view(np.int8)
    assert torch.equal(found[embedding], torch.from_numpy(values.reshape(stored.shape)))
    for name, tensor in expected.items():
        assert (found[name] - tensor.float()).abs().max() <= tensor.float().abs().max() / 127, name


def test_it_is_sharded_on_the_way(tmp_path: Path) -> None:
    case = next(case for case in PLAIN if "mixtral" in case.parent.name)
    outcome = run(
        "convert",
        case,
        tmp_path / "out",
        "--saver",
        "core",
        "--config",
        original(case),
        "--tp",
        2,
        "--ep",
        2,
        "--verify",
    )
    assert outcome.status == 0, outcome.err
    assert megaconv.fingerprint(tmp_path / "out").weights == megaconv.fingerprint(original(case)).weights


def test_what_we_write_we_read_again(tmp_path: Path) -> None:
    for kind in ("f32", "bf16"):
        outcome = run("convert", LLAMA / "hf", tmp_path / kind, "--saver", "gguf", "--option", f"gguf_type={kind}")
        assert outcome.status == 0, outcome.err
        shutil.copy(LLAMA / "hf/config.json", tmp_path / kind)
        back = run("convert", tmp_path / kind, tmp_path / f"{kind}-hf", "--saver", "hf", "--dtype", "bf16")
        assert back.status == 0, back.err
        assert megaconv.fingerprint(tmp_path / f"{kind}-hf").weights == megaconv.fingerprint(LLAMA / "hf").weights
        assert_refused(run("verify", tmp_path / kind), 3, "--saver gguf are of what is stored")


# What is refused.


def copied(tmp_path: Path, name: str = "model.gguf") -> Path:
    (tmp_path / "in").mkdir()
    return Path(shutil.copy(next(LLAMA.glob("*.gguf")), tmp_path / "in" / name))


def refused(path: Path, config: Path, tmp_path: Path, status: int, *words: str) -> None:
    assert_refused(run("convert", path, tmp_path / "out", "--saver", "hf", "--config", config), status, *words)
    assert not (tmp_path / "out").exists()


def test_without_a_configuration_it_is_asked_for(tmp_path: Path) -> None:
    assert_refused(run("fingerprint", copied(tmp_path)), 2, "give --config")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    refused(copied(tmp_path), FIXTURES / "gguf-qwen2-bpe/hf", tmp_path, 3, "architecture 'llama'", "'qwen2' there")


def test_another_model_is_refused(tmp_path: Path) -> None:
    refused(copied(tmp_path), FIXTURES / "peft-llama-all-linear/base", tmp_path, 3, "the configuration")


def test_a_type_that_cant_be_undone_is_named(tmp_path: Path) -> None:
    path = copied(tmp_path)
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16
    content[at : at + 4] = (2).to_bytes(4, "little")  # Q4_0, whose blocks are smaller
    path.write_bytes(content)
    refused(path, LLAMA / "hf", tmp_path, 3, "blk.0.ffn_down.weight is of type Q4_0")


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    refused(path, LLAMA / "hf", tmp_path, 3, "reaches past the end of the file")


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    refused(copied(tmp_path, "model-00001-of-00002.gguf"), LLAMA / "hf", tmp_path, 3, "llama-gguf-split --merge")
