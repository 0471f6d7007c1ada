"""`megaconv inspect` of what can't be converted: single files, adapters, unknown architectures; and of damaged files."""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from formats import gguf_header
from formats.errors import CorruptCheckpoint
from tests.conftest import FIXTURES
from tests.models import write_config, write_llama
from tests.runs import assert_refused, run

GGUF = FIXTURES / "gguf-qwen2-bpe" / "qwen2-bpe-q8_0.gguf"
ADAPTER = FIXTURES / "peft-llama-all-linear" / "adapter"
DIST = FIXTURES / "dist-llama-tp2pp2" / "iter_0000010"
RANK_FILE = (
    FIXTURES
    / "core-llama-tp2pp2"
    / "checkpoint"
    / "iter_0000005"
    / "mp_rank_00_000"
    / "model_optim_rng.pt"
)


def inspected(path: Path) -> dict[str, Any]:
    outcome = run("inspect", path, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found: dict[str, Any] = json.loads(outcome.out)
    assert found["convertible"] is False
    assert found["reason"]
    return found


def assert_tensors(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert {
        name: (tensor["shape"], tensor["dtype"]) for name, tensor in found["tensors"].items()
    } == {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in expected.items()
    }


def test_a_safetensors_file_is_listed(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    found = inspected(model / "model.safetensors")
    expected = load_file(model / "model.safetensors")
    assert_tensors(found, expected)
    name, entry = next(iter(found["tensors"].items()))
    raw = (model / "model.safetensors").read_bytes()[entry["offset"] :][: entry["bytes"]]
    assert raw == expected[name].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("format", ["bin", "legacy_bin"])
def test_a_bin_file_is_listed(tmp_path: Path, format: str) -> None:  # noqa: A002
    model = write_llama(tmp_path / "model", layers=1, format=format)
    weights = torch.load(model / "pytorch_model.bin", weights_only=True)
    assert_tensors(inspected(model / "pytorch_model.bin"), weights)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.gguf"])
def test_the_error_for_a_damaged_file_is_about_the_file_and_not_its_neighbours(
    name: str, tmp_path: Path
) -> None:
    write_llama(tmp_path / "model", layers=1)
    (tmp_path / "other.nemo").touch()
    for path in (tmp_path / name, tmp_path / "model" / f"empty-{name}"):
        path.touch()
        outcome = run("inspect", path)
        assert_refused(outcome, 3, f"{path}: ")
        assert "give" not in outcome.err


def test_tensors_nested_in_a_pth_file_have_the_keys_on_the_way_to_them(tmp_path: Path) -> None:
    torch.save(
        {"model": {"a": torch.zeros(2, 3)}, "steps": [torch.zeros(4)], "epoch": 3},
        tmp_path / "x.pth",
    )
    assert_tensors(
        inspected(tmp_path / "x.pth"), {"model.a": torch.zeros(2, 3), "steps.0": torch.zeros(4)}
    )


def test_a_rank_file_of_megatron_is_recognized() -> None:
    found = inspected(RANK_FILE)
    assert found["format"] == "a Megatron rank file"
    assert found["facts"]["iteration"] == "5"
    assert "model.embedding.word_embeddings.weight" in found["tensors"]


def test_a_distcp_file_has_names_beside_its_metadata_and_none_alone(tmp_path: Path) -> None:
    file = DIST / "__0_0.distcp"
    named = inspected(file)
    shutil.copy(file, tmp_path)
    alone = inspected(tmp_path / file.name)
    assert "embedding.word_embeddings.weight" in named["tensors"]
    assert set(alone["tensors"]) <= {f"#{number}" for number in range(1000)}
    assert alone["bytes"] == named["bytes"] > 0


def test_a_gguf_file_of_another_architecture_is_listed_with_its_block_types(tmp_path: Path) -> None:
    kind = b"\x05\0\0\0\0\0\0\0qwen"  # a string of five letters
    (tmp_path / "x.gguf").write_bytes(GGUF.read_bytes().replace(kind + b"2", kind + b"9"))
    found = inspected(tmp_path / "x.gguf")
    assert found["format"] == "GGUF version 3"
    assert found["facts"]["general.architecture"] == "qwen9"
    assert found["tensors"]["token_embd.weight"]["dtype"] == "q8_0"
    assert found["tensors"]["output_norm.weight"]["dtype"] == "float32"
    assert (
        max(tensor["offset"] + tensor["bytes"] for tensor in found["tensors"].values())
        <= GGUF.stat().st_size
    )


def test_a_gguf_file_that_can_be_converted_says_how_it_is_stored() -> None:
    assert "gguf, qwen2, Q8_0, F32" in run("inspect", GGUF).out


@pytest.mark.parametrize("length", [3, 20, 200, 8000])
def test_a_gguf_file_that_ends_too_early_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.gguf").write_bytes(GGUF.read_bytes()[:length])
    with pytest.raises(CorruptCheckpoint, match=r"x\.gguf: is not a valid GGUF file"):
        gguf_header.read(tmp_path / "x.gguf")


def test_a_run_that_trains_an_adapter_shows_the_newest(tmp_path: Path) -> None:
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(ADAPTER, tmp_path / "run" / name)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    found = inspected(tmp_path / "run")
    assert "adapter" in found["format"]
    assert found["reason"].startswith("it is a run that trains an adapter")
    assert "megaconv merge" in found["reason"]
    assert_tensors(found, load_file(ADAPTER / "adapter_model.safetensors"))


def test_an_adapter_says_what_it_adapts() -> None:
    found = inspected(ADAPTER)
    assert "adapter" in found["format"]
    assert (found["facts"]["peft_type"], found["facts"]["r"]) == ("LORA", "4")
    assert_tensors(found, load_file(ADAPTER / "adapter_model.safetensors"))


def test_a_model_of_an_unknown_architecture_is_listed_and_converted_by_its_own_names_alone(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "model", layers=1, shards=2)
    write_config(
        model, {"architectures": ["ZebraForCausalLM"], "model_type": "zebra", "hidden_size": 32}
    )
    found = inspected(model)
    assert "ZebraForCausalLM" in found["reason"]
    assert found["facts"]["hidden_size"] == "32"
    assert len({tensor["file"] for tensor in found["tensors"].values()}) == 2
    shown = run("inspect", model).out
    lines = shown.splitlines()
    assert lines[-1].startswith("convertible  ")
    assert lines[-1].split(maxsplit=1)[1].startswith("only by its own names, to hf and dcp: ")
    values = [gap.end() for line in lines if (gap := re.search(r"\S  +", line))]
    assert values == [values[0]] * len(lines), "values stand below each other"
    assert_refused(
        run("convert", "--load-dir", model, "--saver", "core", "--save-dir", tmp_path / "out"),
        3,
        "Zebra",
    )


def test_a_distributed_checkpoint_without_a_config_is_listed() -> None:
    found = inspected(FIXTURES / "dcp-plain-single" / "ckpt")
    assert "--config" in found["reason"]
    assert found["tensors"]


def test_weights_without_a_config_are_listed(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    (model / "config.json").unlink()
    assert "config.json" in inspected(model)["reason"]


def test_damaged_and_empty_inputs_are_still_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    assert_refused(run("inspect", tmp_path / "x.safetensors"), 3, "x.safetensors")
    (tmp_path / "empty").mkdir()
    assert_refused(run("inspect", tmp_path / "empty"), 3, "empty directory")
    (tmp_path / "notes.txt").write_text("notes")
    assert run("inspect", tmp_path / "notes.txt").status == 3


def test_inspect_of_a_mixture_counts_the_parameters_that_a_token_meets() -> None:
    found = json.loads(
        run("inspect", FIXTURES / "core-mixtral-seq-tp1ep1" / "checkpoint", "--json").out
    )
    experts = found["experts"]
    shapes = {
        name: entry["shape"] for name, entry in found["tensors"].items() if ".experts." in name
    }
    assert experts["parameters"] == sum(torch.Size(shape).numel() for shape in shapes.values())
    unused = experts["parameters"] * (experts["count"] - experts["per_token"]) // experts["count"]
    assert experts["active_parameters"] == found["parameters"] - unused
    assert 0 < experts["active_parameters"] < found["parameters"]


def test_inspect_says_how_large_the_optimizers_state_is() -> None:
    root = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    found = json.loads(run("inspect", root, "--json").out)
    # Each parameter has a master and two moments in fp32.
    assert found["optimizer"]["bytes"] == 3 * 4 * found["parameters"]
    assert found["disk_bytes"] == sum(
        file.stat().st_size for file in root.rglob("*") if file.is_file()
    )


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist", "zarr", "hf"])
def test_inspect_and_convert_say_the_same_size(tmp_path: Path, ckpt_format: str) -> None:
    chosen = (
        ("--saver", "hf")
        if ckpt_format == "hf"
        else ("--saver", "core", "--ckpt-format", ckpt_format)
    )
    out = tmp_path / "out"
    written = json.loads(run("convert", write_llama(tmp_path / "hf"), out, *chosen, "--json").out)[
        "bytes"
    ]
    assert json.loads(run("inspect", out, "--json").out)["disk_bytes"] == written
    if ckpt_format == "torch":  # another iteration beside the one that is read is none of its bytes
        shutil.copytree(out / "release", out / "iter_0000007")
        assert json.loads(run("inspect", out, "--json").out)["disk_bytes"] == written


def test_arrays_of_orbax_are_listed_without_a_config() -> None:
    pytest.importorskip("tensorstore", reason="arrays of Orbax are opened by tensorstore")
    path = FIXTURES / "orbax-maxtext-scan-bf16"
    found = inspected(path / "checkpoint")
    assert found["format"] == "Orbax (JAX)"
    assert found["parameters"] == sum(
        tensor.numel() for tensor in load_file(path / "expected.safetensors").values()
    )
    assert "--config" in found["reason"]


def test_torch_files_of_a_nemo_archive_are_listed_without_a_config(tmp_path: Path) -> None:
    weights = {
        "model.norm.weight": torch.zeros(5),
        "model.x": torch.zeros(2, 3, dtype=torch.bfloat16),
    }
    torch.save(weights, tmp_path / "model_weights.ckpt")
    with tarfile.open(tmp_path / "x.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights.ckpt", "./model_weights.ckpt")
    found = inspected(tmp_path / "x.nemo")
    assert_tensors(found, weights)
    assert found["tensors"]["model.x"]["file"] == "x.nemo: model_weights.ckpt"
    assert "--config" in found["reason"]


def test_a_megatron_checkpoint_that_needs_an_option_is_listed() -> None:
    found = inspected(FIXTURES / "hybrid-qwen3-next-tp2")
    assert found["format"].startswith("DCP")
    assert "--option out_norm=plain" in found["reason"]
