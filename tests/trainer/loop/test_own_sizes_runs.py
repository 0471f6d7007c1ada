"""Runs of models whose layers have sizes or gates of their own: saved, continued at another layout, exported."""

from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.test_gemma_4_runs import (
    FINETUNE,
    assert_transformers_computes_the_same,
    losses,
)
from tests.transformers_oracle import LFMS_3, OWN_SIZES, create

pytestmark = pytest.mark.oracle
MODELS = {**OWN_SIZES, "lfm3": LFMS_3["lfm3"]}
LAYOUTS = ("--tp 2 --sequence-parallel --ckpt-format torch", "--pp 2 --recompute-activations")


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_learns_nothing_goes_back_to_the_same_files(name: str, tmp_path: Path) -> None:
    create(MODELS[name], tmp_path / "hf")
    command = f"finetune --load hf --save run {FINETUNE} --lr 0 --weight-decay 0 --train-iters 1 --moe-router-bias-update-rate 0"
    log = train(tmp_path, 1, command).log(0)
    assert "Megatron core has no modules for this model" in log
    megaconv.convert(tmp_path / "run", tmp_path / "back", saver="hf")
    assert not megaconv.diff(tmp_path / "back", tmp_path / "hf").differences


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, tmp_path: Path
) -> None:
    create(MODELS[name], tmp_path / "hf")
    command = f"finetune --load {tmp_path / 'hf'} --resume --save run {FINETUNE}"
    for place in ("one", "moved"):
        (tmp_path / place).mkdir()
    train(tmp_path / "one", 1, command)
    for words, last in zip(LAYOUTS, ("--exit-interval 2", ""), strict=True):
        train(tmp_path / "moved", 2, f"{command} {words} {last}")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    megaconv.convert(tmp_path / "moved" / "run", tmp_path / "back", saver="hf")
    assert_transformers_computes_the_same(tmp_path / "moved" / "run", tmp_path / "back")
    assert megaconv.diff(tmp_path / "back", tmp_path / "hf").differences
