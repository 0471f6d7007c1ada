"""Patches of multimodal models: encoders and language model, between Hugging Face directories and Megatron runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from tests.conftest import FIXTURES
from tests.patches.test_patches import applied, make
from tests.patches.test_sparse import Served, as_vllm_applies, read_update
from tests.runs import assert_refused, run

OLD = FIXTURES / "whole-qwen2_5_vl"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in one file."""
    target = tmp_path_factory.mktemp("whole") / "old"
    outcome = run("convert", OLD, target, "--saver", "hf")
    assert outcome.status == 0, outcome.err
    return target


@pytest.fixture(scope="module")
def new(old: Path) -> Path:
    """A step in the encoder, the projector and the language model, another configuration and another small file."""
    target = old.with_name("new")
    shutil.copytree(old, target)
    (target / "megaconv.json").unlink()
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if "visual" in name or "layers.0." in name:
            step = torch.rand(tensor.shape, generator=generator) < 0.05
            tensors[name] = torch.where(step, tensor * 1.25, tensor)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"image_token_id": 77}))
    (target / "preprocessor_config.json").write_text('{"size": 5}')
    return target


def require_model(made: Path, new: Path) -> None:
    ours, theirs = load_file(made / "model.safetensors"), load_file(new / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert json.loads((made / "config.json").read_text())["image_token_id"] == 77
    assert (made / "preprocessor_config.json").read_text() == '{"size": 5}'


def test_a_patch_holds_encoders_and_small_files(old: Path, new: Path, tmp_path: Path) -> None:
    report = make(old, new, tmp_path / "patch")
    before, after = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    assert any("visual" in name and not torch.equal(before[name], after[name]) for name in after)
    assert report["new"]["weights"] == megaconv.fingerprint(new).weights
    require_model(applied(old, tmp_path / "patch", target=tmp_path / "made"), new)


def test_a_patch_of_a_multimodal_megatron_run_applies_to_every_format(
    old: Path, new: Path, tmp_path: Path
) -> None:
    core = tmp_path / "core"
    words = ("--saver", "core", "--tp", 2, "--ckpt-format", "torch_dist")
    assert run("convert", old, core, *words).status == 0
    make(core, new, tmp_path / "patch")
    made = applied(core, tmp_path / "patch", target=tmp_path / "made")
    assert run("diff", made, new).status == 0
    hf = applied(old, tmp_path / "patch", target=tmp_path / "hf")
    require_model(hf, new)


def test_a_base_without_the_encoder_is_refused(old: Path, new: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    assert run("convert", old, text, "--saver", "hf", "--text-only").status == 0
    outcome = run("delta", text, new, "--save-dir", tmp_path / "patch")
    assert_refused(outcome, 2, "--text-only")
    make(old, new, tmp_path / "patch")
    outcome = run("apply", text, tmp_path / "patch", "--save-dir", tmp_path / "made")
    assert_refused(outcome, 4, "is not the base of")
    assert not (tmp_path / "made").exists()


def test_an_update_for_vllm_holds_encoders(old: Path, new: Path, tmp_path: Path) -> None:
    outcome = run("delta", old, new, "--sparse", "vllm", "--save-dir", tmp_path / "up")
    assert outcome.status == 0, outcome.err
    model = Served(old)
    as_vllm_applies(model, list(read_update(tmp_path / "up")))
    expected = load_file(new / "model.safetensors")
    assert all(torch.equal(model.tensors[name], tensor) for name, tensor in expected.items())
