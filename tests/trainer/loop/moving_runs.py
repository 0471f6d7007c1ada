"""Runs of models that Megatron core has no modules for: at one layout, moved to another one, exported, and without learning."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.parallel.changed_configurations import TOKENS, logits_of_the_trainer
from tests.transformers_oracle import VOCAB, compute, load

FINETUNE = (
    f"--mock-data --seq-length 16 --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --global-batch-size 4 --lr 1e-3 --fp32 "
    "--log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --train-iters 4"
)
NO_MODULES = "Megatron core has no modules for this model"
"""What the log of such a run says."""


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory)]


def assert_transformers_computes_the_same(run: Path, exported: Path) -> None:
    expected, found = compute(load(exported), TOKENS), logits_of_the_trainer(run)
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def assert_goes_on_elsewhere(
    source: Path,
    directory: Path,
    layouts: Sequence[str],
    processes: int = 2,
    notice: str = NO_MODULES,
) -> Path:
    """Train on one process, and half of it at each of two layouts. Returns what the second run is exported to.

    notice: the words of the log that say why no other software loads the run's checkpoints.
    The losses agree, transformers computes the same from the export, and the run has learned something.
    """
    command = f"finetune --load {source} --resume --save run {FINETUNE}"
    for place in ("one", "moved"):
        (directory / place).mkdir()
    one = train(directory / "one", 1, command)
    assert notice in one.log(0)
    for words, last in zip(layouts, ("--exit-interval 2", ""), strict=True):
        train(directory / "moved", processes, f"{command} {words} {last}")
    assert losses(directory / "moved") == pytest.approx(losses(directory / "one"), rel=1e-5)
    exported = directory / "back"
    megaconv.convert(directory / "moved" / "run", exported, saver="hf")
    assert_transformers_computes_the_same(directory / "moved" / "run", exported)
    assert megaconv.diff(exported, source).differences
    return exported


def assert_goes_back_unchanged(
    source: Path, directory: Path, words: str = "", processes: int = 1
) -> None:
    """Take one step that learns nothing, and export the run: all tensors of the source."""
    still = "--lr 0 --weight-decay 0 --train-iters 1"
    command = f"finetune --load {source} --save run {FINETUNE} {still} {words}"
    assert "its checkpoints are for megatron-lite" in train(directory, processes, command).log(0)
    megaconv.convert(directory / "run", directory / "back", saver="hf")
    assert megaconv.diff(directory / "back", source).same
