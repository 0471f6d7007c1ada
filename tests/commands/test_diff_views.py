"""`megaconv diff` for people: the configuration first, kinds of tensors, a limit, a tolerance, and how far layers moved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.tensor import ITEMSIZE
from megaconv.commands.movement import Moved, Movement
from megaconv.values.rounding import numbers
from tests.models import write_config, write_llama
from tests.runs import assert_refused, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "a", layers=3, dtype="float32")


def finetuned(
    model: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any
) -> Path:
    other = model.parent / "b"
    write_config(other, json.loads((model / "config.json").read_text()) | config)
    weights = {
        name: change(name, tensor).contiguous()
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def test_the_configuration_comes_before_the_tensors_and_kinds_are_summed_up(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + ("up_proj" in name), rope_theta=500.0)
    lines = run("diff", model, other).out.splitlines()
    assert lines[0] == "different: 3 of 30 tensors"
    assert "positions.theta" in lines[1]
    assert lines[2].startswith("  layers.*.mlp.up.weight  values     3 tensors, ")
    assert lines[2].endswith(", largest difference 1")
    assert lines[3:] == ["--all lists each tensor that differs"]


def test_each_tensor_is_listed_on_demand_behind_the_summary(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + 1)
    summary = run("diff", model, other).out.splitlines()
    assert (summary[0], len(summary)) == ("different: 30 of 30 tensors", 14)
    assert not any("layers.1" in line for line in summary)
    listed = run("diff", model, other, "--all").out.splitlines()
    assert listed[:13] == summary[:13]
    assert [line.split()[0] for line in listed[13:]] == list(megaconv.open(model).tensors)


def test_each_tensor_comes_behind_how_far_layers_moved(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor if ".0." in name else tensor * 1.5)
    lines = run("diff", model, other, "--stats", "--all").out.splitlines()
    first = [
        next(number for number, line in enumerate(lines) if line.startswith(begin))
        for begin in ("  layers.*.attn.q.weight", "layers.1 ", "  layers.1.attn.q.weight")
    ]
    assert first == sorted(first)


def test_a_kind_with_one_tensor_is_called_by_its_name(model: Path) -> None:
    other = finetuned(
        model, lambda name, tensor: tensor.bfloat16() if "layers.2.mlp.up" in name else tensor
    )
    lines = run("diff", model, other).out.splitlines()
    assert lines == [
        "different: 1 of 30 tensors",
        "  layers.2.mlp.up.weight  dtype      float32 / bfloat16",
    ]


def test_differences_within_the_tolerance_are_none(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + 1e-5)
    assert run("diff", model, other).status == 4
    within = run("diff", model, other, "--tolerance", "1e-4")
    assert (within.status, within.out) == (
        0,
        "the same: 30 tensors are equal, 30 of them within the tolerance\n",
    )
    assert run("diff", model, other, "--tolerance", "1e-6").status == 4


def test_a_tolerance_is_a_number(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + 1)
    for word in ("nan", "inf"):
        assert_refused(run("diff", model, other, "--tolerance", word), 2, "--tolerance")


def test_statistics_show_weights_that_became_infinite_or_nan(model: Path) -> None:
    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if name == "model.norm.weight":
            tensor[0] = float("nan")
        if name.startswith("model.layers.1.mlp.up"):
            tensor[0, 0] = float("inf")
        return tensor

    other = finetuned(model, broken)
    outcome = run("diff", model, other, "--stats", "--json")
    moved = json.loads(outcome.out)["movement"]["layers"]
    infinite = {"changed": 1, "relative": None, "max_abs": None}
    for layer in ("layers.1", "final_norm.weight"):
        assert moved[layer].items() >= infinite.items(), layer
    assert moved["layers.0"]["changed"] == 0
    lines = run("diff", model, other, "--stats").out.splitlines()
    assert next(line for line in lines if line.startswith("layers.1 ")).split()[1:3] == ["inf"] * 2

    same = run("diff", other, other, "--stats", "--json")
    unmoved = json.loads(same.out)["movement"]["layers"]
    assert {tuple(layer.values())[1:] for layer in unmoved.values()} == {(0, 0.0, 0.0)}


def test_metadata_alone_doesnt_call_tensors_equal(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + 1)
    assert (
        run("diff", model, other, "--metadata").out
        == "the same names, shapes and dtypes: 30 tensors\n"
    )


def test_metadata_alone_doesnt_look_at_values(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor + 1)
    assert run("diff", model, other, "--metadata").status == 0
    other = finetuned(model, lambda name, tensor: tensor.bfloat16() if "norm" in name else tensor)
    outcome = run("diff", model, other, "--metadata", "--json")
    assert outcome.status == 4
    assert {item["kind"] for item in json.loads(outcome.out)["differences"]} == {"dtype"}
    assert_refused(run("diff", model, other, "--metadata", "--stats"), 2, "--metadata", "--stats")


def test_stats_say_which_layer_moved_how_far(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor * 1.5 if ".1." in name else tensor)
    outcome = run("diff", model, other, "--stats", "--json")
    layers = json.loads(outcome.out)["movement"]["layers"]
    assert layers["layers.1"]["relative"] == pytest.approx(0.5, rel=1e-6)
    assert {name for name, layer in layers.items() if layer["relative"]} == {"layers.1"}
    shown = run("diff", model, other, "--stats").out
    assert any(line.startswith("layers.1 ") and "5.000e-01" in line for line in shown.splitlines())
    moved = Movement((Moved("layers.1", 4, 4, 4.0, 1.0, 0.5),))
    assert [list(moved.lines(blocks=blocks))[1][-1] for blocks in (True, False)] == ["█", "#"]


def test_stats_compare_different_dtypes(model: Path) -> None:
    other = finetuned(model, lambda name, tensor: tensor.bfloat16())
    moved = json.loads(run("diff", model, other, "--stats", "--json").out)["movement"]["tensors"]
    assert all(tensor["relative"] < 2**-8 for tensor in moved.values())
    assert any(tensor["relative"] > 0 for tensor in moved.values())


@pytest.mark.parametrize("dtype", [name for name in ITEMSIZE if name.startswith("float8")])
def test_eight_bit_numbers_are_torchs(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        torch.from_numpy(numbers(codes.numpy(), dtype).copy()),
        codes.view(getattr(torch, dtype)).double(),
        equal_nan=True,
    )
