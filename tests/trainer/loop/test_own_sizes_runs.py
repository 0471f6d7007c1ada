"""Runs of models whose layers have sizes or gates of their own: saved, continued at another layout, exported."""

from pathlib import Path

import pytest

from tests.trainer.loop.moving_runs import assert_goes_back_unchanged, assert_goes_on_elsewhere
from tests.transformers_oracle import LFMS_3, OWN_SIZES, create

pytestmark = pytest.mark.oracle
MODELS = {**OWN_SIZES, "lfm3": LFMS_3["lfm3"]}
LAYOUTS = ("--tp 2 --sequence-parallel --ckpt-format torch", "--pp 2 --recompute-activations")


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_learns_nothing_goes_back_to_the_same_files(name: str, tmp_path: Path) -> None:
    create(MODELS[name], tmp_path / "hf")
    assert_goes_back_unchanged(tmp_path / "hf", tmp_path, "--moe-router-bias-update-rate 0")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, tmp_path: Path
) -> None:
    create(MODELS[name], tmp_path / "hf")
    assert_goes_on_elsewhere(tmp_path / "hf", tmp_path, LAYOUTS)
