"""Runs of Gemma 4: saved, continued at another layout, exported; with adapters, and back into the multimodal model."""

from pathlib import Path

import pytest
import torch

import megaconv
from tests.trainer.loop.launches import train
from tests.trainer.loop.test_manners import metrics
from tests.trainer.parallel.changed_configurations import TOKENS, logits_of_the_trainer
from tests.transformers_oracle import GEMMAS_4, VOCAB, compute, create, load

pytestmark = pytest.mark.oracle
FINETUNE = (
    f"--mock-data --seq-length 16 --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --global-batch-size 4 --lr 1e-3 --fp32 "
    "--log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --train-iters 4"
)
DENSE, MIXTURE = "gemma4_unified_text", "gemma4_text, experts"
LAYER_INPUTS = "gemma4_text, layer inputs"


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory)]


def assert_transformers_computes_the_same(run: Path, exported: Path) -> None:
    expected, found = compute(load(exported), TOKENS), logits_of_the_trainer(run)
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param(
            DENSE,
            [(2, "--tp 2 --sequence-parallel --ckpt-format torch"), (2, "--pp 2")],
            marks=pytest.mark.slow,
        ),
        (LAYER_INPUTS, [(2, "--tp 2 --ckpt-format torch --recompute-activations"), (2, "--pp 2")]),
        pytest.param(
            MIXTURE,
            [(2, "--ep 2 --use-distributed-optimizer"), (2, "--tp 2 --sequence-parallel")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_at_another_layout_and_transformers_loads_what_it_learned(
    name: str, layouts: list[tuple[int, str]], tmp_path: Path
) -> None:
    create(GEMMAS_4[name], tmp_path / "hf")
    command = f"finetune --load {tmp_path / 'hf'} --resume --save run {FINETUNE}"
    for place in ("one", "moved"):
        (tmp_path / place).mkdir()
    one = train(tmp_path / "one", 1, command)
    assert "Megatron core has no modules for this model" in one.log(0)
    for (size, words), last in zip(layouts, ("--exit-interval 2", ""), strict=True):
        train(tmp_path / "moved", size, f"{command} {words} {last}")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    megaconv.convert(tmp_path / "moved" / "run", tmp_path / "back", saver="hf")
    assert_transformers_computes_the_same(tmp_path / "moved" / "run", tmp_path / "back")
    assert megaconv.diff(tmp_path / "back", tmp_path / "hf").differences


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
