"""Runs of Gemma 4: saved, continued at another layout, exported; with adapters, and back into the multimodal model."""

from pathlib import Path

import pytest
import torch

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.moving_runs import FINETUNE, assert_goes_on_elsewhere
from tests.trainer.parallel.changed_configurations import TOKENS
from tests.transformers_oracle import GEMMAS_4, compute, create, load

pytestmark = pytest.mark.oracle
DENSE, MIXTURE = "gemma4_unified_text", "gemma4_text, experts"
LAYER_INPUTS = "gemma4_text, layer inputs"


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param(
            DENSE,
            ["--tp 2 --sequence-parallel --ckpt-format torch", "--pp 2"],
            marks=pytest.mark.slow,
        ),
        (LAYER_INPUTS, ["--tp 2 --ckpt-format torch --recompute-activations", "--pp 2"]),
        pytest.param(
            MIXTURE,
            ["--ep 2 --use-distributed-optimizer", "--tp 2 --sequence-parallel"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, layouts: list[str], tmp_path: Path
) -> None:
    create(GEMMAS_4[name], tmp_path / "hf")
    assert_goes_on_elsewhere(tmp_path / "hf", tmp_path, layouts)


def test_adapters_are_merged_into_the_matrices_that_a_layer_has(tmp_path: Path) -> None:
    """Layers whose keys are their values have no projection of values."""
    create(GEMMAS_4[DENSE], tmp_path / "hf")
    train(tmp_path, 1, f"finetune --load hf --lora-rank 4 --save run {FINETUNE}")
    saved = tmp_path / "run" / "iter_0000004"
    megaconv.convert(tmp_path / "hf", tmp_path / "merged", saver="hf", adapters=[str(saved)])
    diff = megaconv.diff(tmp_path / "hf", tmp_path / "merged")
    changed = {item.key.name for item in diff.differences}
    assert {f"layers.{layer}.attn.k.weight" for layer in range(4)} <= changed
    assert {f"layers.{layer}.attn.v.weight" for layer in range(4)} & changed == {
        "layers.0.attn.v.weight",
        "layers.2.attn.v.weight",
    }
    assert torch.isfinite(compute(load(tmp_path / "merged"), TOKENS)).all()
