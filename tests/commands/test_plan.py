"""`megaconv plan`: which layouts a model can have, what a rank holds, and the memory to train it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UsageError
from megaconv.model.memory import bytes_per_parameter
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

MIXTURE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


def planned(path: Path, *options: object) -> list[dict[str, Any]]:
    outcome = run("plan", path, *options, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(outcome.out)["layouts"]
    return found


@pytest.mark.parametrize(
    ("dtype", "everywhere", "over_four"),
    [("float16", 20, 8), ("bfloat16", 18, 9), ("float32", 16, 10)],
)
def test_bytes_of_a_parameter_are_megatrons(dtype: str, everywhere: int, over_four: int) -> None:
    assert bytes_per_parameter(dtype, 4, distributed_optimizer=False) == everywhere
    assert bytes_per_parameter(dtype, 4, distributed_optimizer=True) == over_four
    assert bytes_per_parameter(dtype, 1, distributed_optimizer=True) == everywhere


def test_a_momentum_is_four_bytes_less_than_two_moments() -> None:
    assert bytes_per_parameter("bfloat16", 4, distributed_optimizer=False, states=1) == 14
    assert bytes_per_parameter("bfloat16", 4, distributed_optimizer=True, states=1) == 8


def test_nothing_is_trained_in_eight_bits() -> None:
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        bytes_per_parameter("float8_e4m3fn", 1, distributed_optimizer=True)


def test_a_rank_of_a_planned_layout_holds_what_a_rank_of_a_conversion_does(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    run(
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--tp",
        2,
        "--pp",
        2,
    )
    files = (tmp_path / "out").rglob("model_optim_rng.pt")
    held = [json.loads(run("inspect", file, "--json").out)["bytes"] for file in files]
    (layout,) = [one for one in planned(model) if (one["tp"], one["pp"]) == (2, 2)]
    assert layout["weight_bytes"] == max(held)


def test_the_optimizers_share_falls_with_more_gpus(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    alone, eight = planned(model)[0], planned(model, "--gpus", 8)[0]
    assert alone["training_bytes"] == 18 * alone["parameters"]
    assert eight["training_bytes"] == int((6 + 12 / 8) * eight["parameters"])


def test_experts_are_shared_out_over_their_own_data_parallel_ranks() -> None:
    (layout,) = [
        one
        for one in planned(MIXTURE, "--gpus", 8)
        if (one["tp"], one["pp"], one["ep"]) == (1, 1, 4)
    ]
    dense = layout["parameters"] - layout["expert_parameters"]
    assert layout["training_bytes"] == int(
        dense * (6 + 12 / 8) + layout["expert_parameters"] * (6 + 12 / 2)
    )


def test_every_planned_layout_can_be_converted_to(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    for one in planned(model):
        sizes = [word for name in ("tp", "pp") for word in (f"--{name}", one[name])]
        command = (
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            tmp_path / "out",
            "--dry-run",
            *sizes,
        )
        assert run(*command).status == 0


def test_gpus_that_are_too_small_are_marked_and_impossible_sizes_named(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    found = planned(model, "--gpu-memory", "200KB")
    assert {one["fits"] for one in found} == {True, False}
    assert all(one["fits"] == (one["training_bytes"] <= 200_000) for one in found)
    shown = run("plan", model, "--gpu-memory", "200KB").out
    assert "too large" in shown
    assert "not possible: TP 16" in shown
    assert_refused(run("plan", model, "--gpus", 7, "--gpu-memory", "many"), 2, "many")
