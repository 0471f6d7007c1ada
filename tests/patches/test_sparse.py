"""`delta --sparse vllm`: vLLM's own code takes the update, and its model then has the newer weights.

`as_vllm_applies` computes as vLLM 0.33.0 does. With VLLM_SOURCE, a directory with the package `vllm`, the test runs vLLM's own
file as well: `pip download --no-deps vllm==0.33.0`, then `unzip`.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import UsageError
from megaconv.patches import sparse
from megaconv.patches.sparse import ENGINES
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.patches.test_patches import trained
from tests.runs import assert_refused, run, unchanged

VLLM_SOURCE = os.environ.get("VLLM_SOURCE")


class SparseWeightPatch(NamedTuple):
    """The fields of vLLM's class of this name."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]


def read_update(directory: Path) -> Iterator[SparseWeightPatch]:
    """An update, read as docs/delta.md shows."""
    arrays = load_file(directory / "patches.safetensors")
    for patch in json.loads((directory / "sparse.json").read_text())["patches"]:
        name = patch["name"]
        yield SparseWeightPatch(
            name, arrays[f"{name}.indices"], arrays[f"{name}.values"], tuple(patch["full_shape"])
        )


class Served(torch.nn.Module):
    """A model as vLLM's loader sees it: checkpoint names, and one copy into each parameter."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.tensors = load_file(directory / "model.safetensors")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)
            names.add(name)
        return names


def as_vllm_applies(model: Served, patches: list[SparseWeightPatch]) -> None:
    """The checks of vLLM, and the new values at their positions."""
    for patch in patches:
        target = model.tensors[patch.name]
        assert patch.indices.dtype == torch.int32
        assert patch.indices.ndim == patch.values.ndim == 1
        assert patch.indices.numel() == patch.values.numel() > 0
        assert patch.values.dtype == target.dtype
        assert patch.full_shape == tuple(target.shape)
        assert not torch.isnan(patch.values).any()
        positions = patch.indices.long()
        assert positions.unique().numel() == positions.numel()
        target.view(-1).index_copy_(0, positions, patch.values)


def vllm_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's own file, without its package: that needs a GPU's libraries."""
    if VLLM_SOURCE is None:
        pytest.skip("needs VLLM_SOURCE")
    others: Any = ModuleType("vllm.model_executor.models.utils")
    others._get_tied_embedding_params = lambda model: {}
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, others.__name__, others)
    path = Path(VLLM_SOURCE, "vllm/model_executor/model_loader/checkpoint_weight_patch.py")
    spec = importlib.util.spec_from_file_location("vllm_patch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm_patch", module)
    spec.loader.exec_module(module)
    return module


def by_vllm(module: Any) -> Callable[[Served, list[SparseWeightPatch]], None]:
    def apply(model: Served, patches: list[SparseWeightPatch]) -> None:
        module.load_checkpoint_weight_patches(
            model,
            [
                module.CheckpointWeightPatch(
                    each.name, each.full_shape, each.values.dtype, each.values, each.indices
                )
                for each in patches
            ],
        )

    return apply


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "old", vocab=128)


def require_update(
    apply: Callable[[Served, list[SparseWeightPatch]], None], old: Path, new: Path, update: Path
) -> list[SparseWeightPatch]:
    model, patches = Served(old), list(read_update(update))
    apply(model, patches)
    expected = load_file(new / "model.safetensors")
    assert model.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(model.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
    return patches


@pytest.mark.parametrize("of_vllm", [False, True], ids=["as vLLM", "by vLLM"])
def test_vllm_makes_the_newer_weights_of_an_update(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_vllm: bool
) -> None:
    apply = by_vllm(vllm_module(monkeypatch)) if of_vllm else as_vllm_applies
    new = trained(old, tmp_path / "new", share=0.02)
    outcome = run("delta", old, new, "--sparse", "vllm", "--save-dir", tmp_path / "up", "--json")
    assert outcome.status == 0, outcome.err
    report = json.loads(outcome.out)
    patches = require_update(apply, old, new, tmp_path / "up")
    before, after = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    changed = {name: int((before[name] != after[name]).sum()) for name in after}
    assert {each.name: each.values.numel() for each in patches} == {
        name: count for name, count in changed.items() if count
    }
    assert report["elements"] == sum(changed.values())
    assert report["engine"] == "vllm"
    index = json.loads((tmp_path / "up" / "sparse.json").read_text())
    assert (index["engine"], index["engine_version"]) == ("vllm", ENGINES["vllm"])
    assert index["base"]["weights"] == megaconv.fingerprint(old).weights
    assert index["new"]["weights"] == megaconv.fingerprint(new).weights


def test_a_megatron_run_and_float32_norms_become_an_update(old: Path, tmp_path: Path) -> None:
    """Several dtypes, odd counts: safetensors' own reader refuses arrays that aren't aligned."""
    mixed = [tmp_path / "mixed-old", tmp_path / "mixed-new"]
    for target, seed in zip(mixed, (0, 1), strict=True):
        trained(old, target, seed=seed, share=0.01)
        tensors = load_file(target / "model.safetensors")
        for name in tensors:
            if "input_layernorm" in name:
                tensors[name] = tensors[name].float() + seed
        tensors["lm_head.weight"][0, seed] = -0.0 if seed else 0.0
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    core = tmp_path / "core"
    assert (
        run(
            "convert", mixed[1], core, "--saver", "core", "--tp", 2, "--ckpt-format", "torch_dist"
        ).status
        == 0
    )
    report = megaconv.delta(mixed[0], core, tmp_path / "up", sparse="vllm")
    assert report.changed > 1
    require_update(as_vllm_applies, *mixed, tmp_path / "up")


def test_a_sparse_update_refuses_changes_that_it_cannot_represent(
    old: Path, tmp_path: Path
) -> None:
    new = trained(old, tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = float("nan")
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    target = ("--sparse", "vllm", "--save-dir", tmp_path / "up")
    deeper = write_llama(tmp_path / "deeper", vocab=128, layers=5)
    floats = write_llama(tmp_path / "floats", vocab=128, dtype="float32")
    with unchanged(tmp_path):
        assert_refused(run("delta", old, new, *target), 2, "lm_head.weight", "NaN")
        assert_refused(run("delta", old, deeper, *target), 4, "layers.4", "OLD has no such tensor")
        assert_refused(run("delta", deeper, old, *target), 4, "layers.4", "NEW has no such tensor")
        assert_refused(run("delta", old, floats, *target), 4, "keeps shapes and dtypes")
        outcome = run("delta", old, old, "--sparse", "sglang", "--save-dir", tmp_path / "up")
        assert_refused(outcome, 2, "--sparse 'sglang' is not known", "vllm")


def test_changed_values_that_vllm_does_not_take_are_refused(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = trained(old, tmp_path / "new", share=0.02)
    words = ("delta", old, new, "--sparse", "vllm", "--save-dir", tmp_path / "up")
    with unchanged(tmp_path):
        monkeypatch.setattr(sparse, "_MOST_ELEMENTS", 1000)
        assert_refused(run(*words), 2, "has more than 1,000 elements; vLLM's positions are int32")
        monkeypatch.setattr(sparse, "FLOATS", ("float32",))
        assert_refused(run(*words), 2, "its bfloat16 values changed; vLLM's sparse updates take")


def test_an_update_of_an_adapter_and_one_that_resumes_are_refused(
    old: Path, tmp_path: Path
) -> None:
    peft = FIXTURES / "peft-llama-all-linear"
    words = ("--sparse", "vllm", "--save-dir", tmp_path / "up")
    with unchanged(tmp_path):
        outcome = run("delta", old, old, *words, "--resume")
        assert_refused(outcome, 2, "--resume: an update of --sparse starts again")
        outcome = run(
            "delta", peft / "adapter", peft / "adapter", "--loader", "peft",
            "--config", peft / "base", *words,
        )  # fmt: skip
        assert_refused(outcome, 2, "--sparse: an adapter has no sparse update")
        with pytest.raises(UsageError, match="starts again from the beginning"):
            megaconv.delta(old, old, tmp_path / "up", sparse="vllm", resume=True)


def test_apply_refuses_an_update(old: Path, tmp_path: Path) -> None:
    assert run("delta", old, old, "--sparse", "vllm", "--save-dir", tmp_path / "up").status == 0
    assert list(read_update(tmp_path / "up")) == []
    outcome = run("apply", old, tmp_path / "up", "--save-dir", tmp_path / "made")
    assert_refused(outcome, 2, "is a sparse update", "without --sparse")
