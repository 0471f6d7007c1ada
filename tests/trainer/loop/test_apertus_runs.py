"""Runs of Apertus: saved, continued at another layout, exported; with adapters, and without learning."""

from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.moving_runs import (
    FINETUNE,
    assert_goes_back_unchanged,
    assert_goes_on_elsewhere,
)
from tests.transformers_oracle import APERTUS, create

pytestmark = pytest.mark.oracle
LAYOUTS = ("--tp 2 --recompute-activations", "--pp 2 --ckpt-format torch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("apertus") / "hf"
    create(APERTUS["apertus"], directory)
    return directory


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    source: Path, tmp_path: Path
) -> None:
    exported = assert_goes_on_elsewhere(source, tmp_path, LAYOUTS)
    diff = megaconv.diff(exported, source)
    changed = {item.key.name.rpartition(".act.")[2] for item in diff.differences}
    assert {"alpha_p", "alpha_n"} < changed
    assert changed.isdisjoint(("beta", "eps"))


def test_adapters_change_matrices_alone(source: Path, tmp_path: Path) -> None:
    train(tmp_path, 2, f"finetune --load {source} --lora-rank 4 --tp 2 --save run {FINETUNE}")
    saved = tmp_path / "run" / "iter_0000004"
    megaconv.convert(source, tmp_path / "merged", saver="hf", adapters=[str(saved)])
    diff = megaconv.diff(source, tmp_path / "merged")
    changed = {item.key.name.split(".")[-2] for item in diff.differences}
    assert changed == {"q", "k", "v", "o", "up", "down"}


def test_a_run_that_learns_nothing_goes_back_to_the_same_files(
    source: Path, tmp_path: Path
) -> None:
    assert_goes_back_unchanged(source, tmp_path)
