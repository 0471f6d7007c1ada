"""Runs of models that Megatron's arguments can't describe, although no other part of Megatron core is missing: they are saved
with a config.json, continued at another layout, and exported."""

import json
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.test_gemma_4_runs import (
    FINETUNE,
    assert_transformers_computes_the_same,
    losses,
)
from tests.transformers_oracle import BEYOND_MEGATRON, NAMED, create

pytestmark = pytest.mark.oracle
QUICK = ("bloom", "gpt_neox_japanese")
MODELS = (*QUICK, "mpt", "xglm", "ctrl", "gptj", "codegen", "gpt_neo", "apertus, biases")
"""ALiBi, sines, or other sets of biases."""
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
LAYOUTS = ("--tp 2 --sequence-parallel", "--pp 2 --ckpt-format torch")


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_learns_nothing_goes_back_to_the_same_files(name: str, tmp_path: Path) -> None:
    create((BEYOND_MEGATRON | NAMED)[name], tmp_path / "hf")
    log = train(tmp_path, 1, f"finetune --load hf --save run {FINETUNE} --lr 0 --train-iters 1")
    assert "Megatron core has no modules for this model" in log.log(0)
    megaconv.convert(tmp_path / "run", tmp_path / "back", saver="hf")
    assert megaconv.diff(tmp_path / "back", tmp_path / "hf").same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "xglm", "gpt_neox_japanese"])
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, tmp_path: Path
) -> None:
    create((BEYOND_MEGATRON | NAMED)[name], tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    # Ranks draw the dropout of attention's weights for other heads than a single process does.
    dropped = {key: 0.0 for key in raw if "dropout" in key}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | dropped))
    command = f"finetune --load {tmp_path / 'hf'} --resume --save run {FINETUNE}"
    for place in ("one", "moved"):
        (tmp_path / place).mkdir()
    train(tmp_path / "one", 1, command)
    for words, last in zip(LAYOUTS, ("--exit-interval 2", ""), strict=True):
        train(tmp_path / "moved", 2, f"{command} {words} {last}")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    megaconv.convert(tmp_path / "moved" / "run", tmp_path / "back", saver="hf")
    assert_transformers_computes_the_same(tmp_path / "moved" / "run", tmp_path / "back")
