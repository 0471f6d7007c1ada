"""Runs of models that Megatron's arguments can't describe, although no other part of Megatron core is missing: they are saved
with a config.json, continued at another layout, and exported."""

import json
from pathlib import Path

import pytest

from tests.trainer.loop.moving_runs import assert_goes_back_unchanged, assert_goes_on_elsewhere
from tests.transformers_oracle import BEYOND_MEGATRON, NAMED, create

pytestmark = pytest.mark.oracle
QUICK = (
    "bloom",
    "gpt_neox_japanese",
    "kolibri1",
    "cohere2_moe, sigmoid",
    "cohere, norms of q and k",
    "opt",
)
MODELS = (
    *QUICK,
    "mpt",
    "xglm",
    "ctrl",
    "gptj",
    "codegen",
    "gpt_neo",
    "biogpt",
    "apertus, biases",
    "beam",
    "diffllama",
    "dbrx",
    "modernbert_decoder",
    "openai_gpt",
)
"""ALiBi, sines, other sets of biases, other routers, a norm for each head, or unused positions."""
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
LAYOUTS = ("--tp 2 --sequence-parallel", "--pp 2 --ckpt-format torch")


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_learns_nothing_goes_back_to_the_same_files(name: str, tmp_path: Path) -> None:
    create((BEYOND_MEGATRON | NAMED)[name], tmp_path / "hf")
    assert_goes_back_unchanged(tmp_path / "hf", tmp_path, "--moe-router-bias-update-rate 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "xglm",
        "gpt_neox_japanese",
        "kolibri1",
        "cohere2_moe, sigmoid",
        "cohere, norms of q and k",
        "modernbert_decoder",
    ],
)
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, tmp_path: Path
) -> None:
    create((BEYOND_MEGATRON | NAMED)[name], tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    # Ranks draw the dropout of attention's weights for other heads than a single process does.
    dropped = {key: 0.0 for key in raw if "dropout" in key}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | dropped))
    assert_goes_on_elsewhere(tmp_path / "hf", tmp_path, LAYOUTS)


@pytest.mark.slow
def test_a_run_with_unused_positions_goes_on_at_another_layout(tmp_path: Path) -> None:
    """The table of OPT's positions has two rows more than config.json says."""
    create(BEYOND_MEGATRON["opt"], tmp_path / "hf")
    notice = "Megatron's arguments can't describe this model's mlp.activation, positions.offset"
    assert_goes_on_elsewhere(tmp_path / "hf", tmp_path, LAYOUTS, notice=notice)
