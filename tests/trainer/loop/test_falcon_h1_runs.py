"""Runs of Falcon-H1: saved, continued at another layout, exported; with adapters, and without learning."""

from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.moving_runs import (
    FINETUNE,
    assert_goes_back_unchanged,
    assert_goes_on_elsewhere,
)
from tests.transformers_oracle import FALCONS_H1, create

pytestmark = pytest.mark.oracle
LAYOUTS = ("--tp 2 --sequence-parallel --ckpt-format torch", "--pp 2 --ckpt-format torch")
ADAPTED = {
    *(f"attn.{name}" for name in ("q", "k", "v", "o")),
    *(f"mamba.{name}" for name in ("z", "x", "B", "C", "dt")),
    *(f"mlp.{name}" for name in ("gate", "up", "down")),
}
"""All matrices but the last one of Mamba 2, for which peft refuses adapters."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("falcon") / "hf"
    create(FALCONS_H1["falcon_h1"], directory)
    return directory


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    source: Path, tmp_path: Path
) -> None:
    assert_goes_on_elsewhere(source, tmp_path, LAYOUTS)


def test_adapters_change_matrices_alone(source: Path, tmp_path: Path) -> None:
    train(tmp_path, 1, f"finetune --load {source} --lora-rank 4 --save run {FINETUNE}")
    saved = tmp_path / "run" / "iter_0000004"
    megaconv.convert(source, tmp_path / "merged", saver="hf", adapters=[str(saved)])
    diff = megaconv.diff(source, tmp_path / "merged")
    changed = {item.key.name for item in diff.differences}
    assert {name.split(".", 2)[2].removesuffix(".weight") for name in changed} == ADAPTED


def test_a_run_that_learns_nothing_goes_back_to_the_same_files(
    source: Path, tmp_path: Path
) -> None:
    assert_goes_back_unchanged(source, tmp_path, "--pp 2", processes=2)
