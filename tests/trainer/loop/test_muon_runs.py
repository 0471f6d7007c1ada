"""Runs with Muon: what is saved is gone on with to the same bits."""

from pathlib import Path

import pytest

from tests.runs import run as megaconv
from tests.trainer.loop.launches import LLAMA, launch, metrics, train

MUON = (
    f"pretrain {LLAMA} --optimizer muon --bf16 --train-iters 4 --check-weight-hash-across-dp-replicas-interval 1 "
    "--qk-clip --qk-clip-threshold 0.001"
)


ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 10000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "size", "more"),
    [("torch_dist", 2, ZERO), ("torch", 1, ""), ("torch", 2, "--optimizer dist_muon")],
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    form: str, size: int, more: str, tmp_path: Path
) -> None:
    train(tmp_path / "straight", size, f"{MUON} {more} --ckpt-format {form} --save ckpt")
    for part in ("--exit-interval 2", "--resume"):
        train(tmp_path / "stopped", size, f"{MUON} {more} --ckpt-format {form} --save ckpt {part}")
    straight, stopped = (metrics(tmp_path / name) for name in ("straight", "stopped"))
    for name in ("loss", "max_attention_logit"):
        assert [line[name] for line in straight] == [line[name] for line in stopped]
    assert straight[0]["max_attention_logit"] > 0.001
    outcome = megaconv("diff", tmp_path / "straight" / "ckpt", tmp_path / "stopped" / "ckpt")
    assert outcome.status == 0
    assert "momentum_buffer" in outcome.out


@pytest.mark.slow
def test_state_of_a_distributed_optimizer_continues_in_one_process_and_is_converted(
    tmp_path: Path,
) -> None:
    """Weights and state are those of one process, whose own losses follow."""
    train(tmp_path, 2, f"{MUON} {ZERO} --save ckpt --exit-interval 2")
    train(tmp_path, 1, f"{MUON} --load ckpt --save other")
    train(tmp_path / "alone", 1, f"{MUON} --save ckpt")
    found, expected = (
        [line["loss"] for line in metrics(at)] for at in (tmp_path, tmp_path / "alone")
    )
    assert found == pytest.approx(expected, rel=2e-3)
    assert megaconv("convert", tmp_path / "ckpt", tmp_path / "hf", "--saver", "hf").status == 0
    core = ("convert", tmp_path / "ckpt", tmp_path / "ranks", "--saver", "core")
    refused = megaconv(*core)
    assert (refused.status, "state is Muon's" in refused.err, "--no-optimizer" in refused.err) == (
        2,
        True,
        True,
    )
    assert megaconv(*core, "--no-optimizer").status == 0


def test_state_of_another_optimizer_is_refused_with_both_remedies(
    tmp_path: Path,
) -> None:
    train(tmp_path, 1, f"{MUON} --save ckpt --exit-interval 1")
    running = launch(
        tmp_path, 1, f"pretrain {LLAMA} --bf16 --train-iters 4 --load ckpt --save other"
    )
    assert running.wait() == [2]
    for words in (
        "momentum_buffer, which another optimizer",
        "give the --optimizer",
        "--no-load-optim",
    ):
        assert words in running.log(0)
