"""Runs whose experts drop the tokens beyond their capacity: they go on, and their checkpoints are converted."""

import logging
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import MIXTRAL, metrics, train


def test_a_run_whose_experts_drop_tokens_goes_on_and_is_converted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = (
        f"pretrain {MIXTRAL} --train-iters 3 --save run --resume --moe-expert-capacity-factor 0.5"
    )
    for place, parts in (("whole", [""]), ("parts", ["--exit-interval 2", ""])):
        (tmp_path / place).mkdir()
        for words in parts:
            train(tmp_path / place, 1, f"{command} {words}")
    whole, parted = tmp_path / "whole", tmp_path / "parts"
    losses = [[line["loss"] for line in metrics(place)] for place in (whole, parted)]
    assert losses[0] == losses[1]
    with caplog.at_level(logging.WARNING, "megaconv"):
        megaconv.convert(parted / "run", tmp_path / "hf", saver="hf")
    assert "moe_expert_capacity_factor is 0.5" in caplog.text
    assert megaconv.diff(tmp_path / "hf", whole / "run").same
