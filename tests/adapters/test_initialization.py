"""PiSSA and OLoRA: merged as peft does after it computed the changed base again, within the rounding of its decomposition."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.adapters.initialization import leading, principal
from tests.adapters.test_adapters import edited
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

CASES = sorted(FIXTURES.glob("initialized-*"))
PISSA, OLORA = FIXTURES / "initialized-pissa", FIXTURES / "initialized-olora"
CONV1D = FIXTURES / "initialized-pissa-conv1d"
FUSED = FIXTURES / "initialized-pissa-fused"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merged_by_megaconv(case: Path, out: Path) -> dict[str, torch.Tensor]:
    outcome = run("merge", case / "base", case / "adapter", "--save-dir", out)
    assert outcome.status == 0, outcome
    return load_file(out / "model.safetensors")


def rounding_of(weight: torch.Tensor, rank: int) -> float:
    """The largest error of a decomposition in float32: the error of the matrix, divided by the distance of singular values."""
    singular = torch.linalg.svdvals(weight.double())
    distance = 1 - singular[rank] / singular[rank - 1]
    return float(4 * torch.finfo(torch.float32).eps * singular[0] / distance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merged_weights_are_those_of_peft_but_for_the_rounding_of_its_decomposition(
    case: Path, tmp_path: Path
) -> None:
    ours = merged_by_megaconv(case, tmp_path / "out")
    theirs = load_file(case / "merged/model.safetensors")
    base = load_file(case / "base/model.safetensors")
    assert ours.keys() == theirs.keys()
    ranks = json.loads((case / "adapter" / CONFIG).read_text())
    different = 0
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        distance = (tensor.double() - theirs[name].double()).abs().max()
        if tensor.ndim < 2 or "embed" in name:
            assert distance == 0
            continue
        rank = ranks["rank_pattern"].get(name.split(".")[-2], ranks["r"])
        allowed = rounding_of(base[name], rank)
        if tensor.dtype != torch.float32:
            # A number beside the middle of two neighbors is rounded to either of them.
            largest = max(base[name].abs().max(), tensor.abs().max())
            allowed += float(largest) * torch.finfo(tensor.dtype).eps
            different += int((tensor != theirs[name]).sum())
        assert distance <= allowed, name
        assert not torch.equal(tensor, base[name]) or torch.equal(theirs[name], base[name])
    assert different < 0.01 * sum(tensor.numel() for tensor in ours.values())


def test_parts_of_fused_weights_are_the_same_at_any_layout(tmp_path: Path) -> None:
    case = FUSED
    adapters = [str(case / "adapter")]
    report = megaconv.convert(
        case / "base", tmp_path / "core", saver="core", tp=2, pp=2, adapters=adapters
    )
    merged_by_megaconv(case, tmp_path / "out")
    assert report.fingerprint == megaconv.fingerprint(tmp_path / "out")


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (2100, 9)], ids=str)
def test_the_part_of_pissa_is_that_of_the_largest_singular_values(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    left, right = principal(weight, 4)
    assert (left.shape, right.shape) == ((shape[0], 4), (4, shape[1]))
    u, s, v = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    exact = u[:, :4] * s[:4] @ v[:4]
    assert np.abs(left.astype(np.float64) @ right - exact).max() < 2e-7 * s[0]


def test_the_part_of_olora_is_that_of_the_first_columns() -> None:
    weight = np.random.default_rng(3).standard_normal((40, 24)).astype(np.float32)
    left, right = leading(weight, 4, 1.5)
    q, r = np.linalg.qr(weight.astype(np.float64))
    exact = 1.5 * q[:, :4] @ r[:4]
    assert np.abs(left.astype(np.float64) @ right - exact).max() < 1e-6


def with_base(case: Path, target: Path, weight: torch.Tensor) -> Path:
    """A copy of a case whose first query has another weight."""
    shutil.copytree(case, target)
    file = target / "base/model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: weight.to(tensors[name].dtype)}, file, {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("source", "weight", "words"),
    [
        (PISSA, torch.eye(32), "the singular values 3 and 4 are equal"),
        (OLORA, torch.ones(32, 32), "the first 4 columns depend on each other"),
        (PISSA, torch.full((32, 32), torch.inf), "infinite numbers"),
    ],
    ids=["equal", "dependent", "infinite"],
)
def test_a_base_that_leaves_the_part_open_is_refused(
    source: Path, weight: torch.Tensor, words: str, tmp_path: Path
) -> None:
    case = with_base(source, tmp_path / "case", weight)
    outcome = run("merge", case / "base", case / "adapter", "--save-dir", tmp_path / "out")
    assert outcome.status == 2, outcome
    last = outcome.err.splitlines()[-1]
    assert all(word in last for word in (WEIGHTS, "layers.0.self_attn.q_proj", words)), last
    assert not (tmp_path / "out").exists()


def test_a_remainder_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    """OLoRA takes out the part times alpha / r, which may be larger than the weight."""
    case = with_base(OLORA, tmp_path / "case", torch.eye(32) * 60000)
    settings = {"use_dora": False, "lora_alpha": 400}
    adapter = edited(case / "adapter", tmp_path / "adapter", settings, without_magnitudes)
    half = tmp_path / "half"
    assert run("convert", case / "base", half, "--saver", "hf", "--dtype", "fp16").status == 0
    outcome = run("merge", half, adapter, "--save-dir", tmp_path / "refused")
    assert outcome.status == 2
    assert "infinite in float16" in outcome.err.splitlines()[-1]


def without_magnitudes(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in held.items() if "magnitude" not in name}


def test_a_weight_of_zeros_loses_nothing(tmp_path: Path) -> None:
    case = with_base(PISSA, tmp_path / "case", torch.zeros(32, 32))
    merged = merged_by_megaconv(case, tmp_path / "out")
    assert torch.isfinite(merged["model.layers.0.self_attn.q_proj.weight"]).all()


@pytest.mark.parametrize(
    ("case", "config", "suffix", "words"),
    [
        (PISSA, {"init_lora_weights": "pissa_niter_4"}, "", "path_initial_model_for_weight_conversion"),
        (PISSA, {"init_lora_weights": "corda"}, "", "path_initial_model_for_weight_conversion"),
        (FUSED, {}, ":0.5", "give no weight"),
        (CONV1D, {"init_lora_weights": "olora"}, "", "linear layers alone"),
    ],
    ids=["random", "data", "weight", "conv1d"],
)  # fmt: skip
def test_an_adapter_whose_base_is_not_known_is_refused(
    case: Path, config: dict[str, object], suffix: str, words: str, tmp_path: Path
) -> None:
    adapter = edited(case / "adapter", tmp_path / "adapter", config)
    outcome = run("merge", case / "base", f"{adapter}{suffix}", "--save-dir", tmp_path / "out")
    assert_refused(outcome, outcome.status, "init_lora_weights", words)


def test_an_adapter_beside_another_one_and_a_translated_one_are_refused(tmp_path: Path) -> None:
    adapter, out = PISSA / "adapter", tmp_path / "out"
    outcome = run("merge", PISSA / "base", adapter, adapter, "--save-dir", out)
    assert_refused(outcome, outcome.status, "two adapters, one of them DoRA, PiSSA or OLoRA")
    options = ("--loader", "peft", "--load-dir", adapter, "--config", PISSA / "base")
    outcome = run("convert", *options, "--saver", "peft", "--save-dir", out)
    assert_refused(outcome, outcome.status, CONFIG, "changed the base's weights")


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    shutil.copytree(PISSA, tmp_path / "case")
    base = tmp_path / "case/base"
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})

    def without_whole_head(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in held.items() if "base_layer" not in name}

    adapter = edited(PISSA / "adapter", tmp_path / "adapter", {}, without_whole_head)
    outcome = run("merge", base, adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, outcome.status, "lm_head", "untied weights")
