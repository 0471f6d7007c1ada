"""Runs of Kimi Linear: saved, continued at another layout, exported; with adapters, and without learning."""

from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.moving_runs import (
    FINETUNE,
    assert_goes_back_unchanged,
    assert_goes_on_elsewhere,
)
from tests.transformers_oracle import KIMIS, create, load
from tests.whole_models import weights

pytestmark = pytest.mark.oracle
LAYOUTS = ("--tp 2 --ep 2 --sequence-parallel --ckpt-format torch", "--pp 2 --ckpt-format torch")
MATRICES = {"forget_down", "forget_up", "gate_down", "gate_up", "write"}
"""Matrices that only Kimi delta attention has."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi") / "hf"
    create(KIMIS["kimi_linear"], directory)
    return directory


def adapter_modules(saved: Path) -> set[str]:
    """The modules of an adapter, as peft names them."""
    prefix = "base_model.model."
    names = (name.partition(".lora_")[0] for name in weights(saved) if name.startswith(prefix))
    return {name.removeprefix(prefix) for name in names}


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    source: Path, tmp_path: Path
) -> None:
    assert_goes_on_elsewhere(source, tmp_path, LAYOUTS)


@pytest.mark.slow
def test_adapters_change_matrices_alone(source: Path, tmp_path: Path) -> None:
    train(tmp_path, 1, f"finetune --load {source} --lora-rank 4 --save run {FINETUNE}")
    saved = tmp_path / "run" / "iter_0000004"
    megaconv.convert(source, tmp_path / "merged", saver="hf", adapters=[str(saved)])
    diff = megaconv.diff(source, tmp_path / "merged")
    changed = {item.key.name for item in diff.differences}
    of_mixers = {name.split(".")[-2] for name in changed if ".kda." in name}
    assert of_mixers == {*MATRICES, "q", "k", "v", "o"}
    known = {name for name, _ in load(source).named_modules()}
    adapted = {name for name in adapter_modules(saved) if "experts." not in name}
    assert adapted
    assert adapted <= known, "peft finds modules by these names"


def test_a_run_that_learns_nothing_goes_back_to_the_same_files(
    source: Path, tmp_path: Path
) -> None:
    assert_goes_back_unchanged(
        source, tmp_path, "--moe-router-bias-update-rate 0 --pp 2", processes=2
    )
