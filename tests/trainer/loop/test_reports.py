"""The reports of a run: evaluations, metrics, TensorBoard, the plot."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaconv.model.fields import changed, from_fields
from megatron_lite.checkpoint.state import Progress
from megatron_lite.loop import train as loop
from megatron_lite.loop.log import METRICS, Meter, duration, flops_per_token
from megatron_lite.loop.schedule import Rates
from megatron_lite.objectives.scored_model import SCORED
from megatron_lite.rank.report import StepReport
from tests.trainer.loop.launches import LLAMA, launch, metrics, train
from tests.trainer.parallel.small import MODELS

REPORTING = "--tensorboard-dir events --plot curves/loss.png --eval-interval 2 --eval-iters 2"


def test_a_run_evaluates_reports_and_draws(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 4".replace("--eval-iters 0 ", "")
    ran = train(tmp_path, 1, f"{command} {REPORTING}")
    lines = metrics(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [set(line) for line in steps] == [set(METRICS)] * 4
    assert [line["consumed_samples"] for line in steps] == [4, 8, 12, 16]
    assert all(
        line["memory_bytes"] > 1e7 and line["tokens_per_second"] > 0 and line["mfu"] is None
        for line in steps
    )
    assert [(line["iteration"], set(line)) for line in lines if "validation_loss" in line] == [
        (step, {"iteration", "validation_loss"}) for step in (2, 4)
    ]
    assert sum("test_loss" in line for line in lines) == 1
    assert (tmp_path / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in steps]
    )
    assert "validation loss" in ran.log(0)


@pytest.mark.parametrize(("iteration", "kept"), [(3, 2), (4, 0)])
def test_a_rank_that_prints_nothing_keeps_the_reports_of_one_interval(
    iteration: int, kept: int
) -> None:
    report = StepReport(1.0, 1.0, 1.0, skipped=False, loss_scale=1.0, signals=())
    logging = SimpleNamespace(log_interval=2)
    run: Any = SimpleNamespace(
        place=SimpleNamespace(rank=1),
        progress=Progress(iteration),
        settings=SimpleNamespace(logging=logging),
        interval=[report, report],
    )
    loop._log(run, report, Rates(1e-3, 0.0, None), last=False)
    assert len(run.interval) == kept


def test_wandb_that_is_not_installed_is_asked_for_by_name(tmp_path: Path) -> None:
    running = launch(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --wandb-project p")
    assert running.wait() == [2]
    assert "--wandb-project needs the package wandb: pip install wandb" in running.log(0)


def test_empty_splits_are_fine(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 2".replace("--eval-iters 0 ", "").replace(
        "--mock-data", ""
    )
    (tmp_path / "examples.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9 10 11 12"}\n' * 8)
    ran = train(
        tmp_path,
        1,
        f"{command} --finetune-data examples.jsonl --tokenizer-type NullTokenizer --vocab-size 59",
    )
    assert "no validation data: this run measures no validation loss" in ran.log(0)
    assert "no test data: this run measures no test loss" in ran.log(0)


def test_operations_are_counted_as_published() -> None:
    """Llama-2-7B by hand: every matrix that is multiplied, and the attention."""
    config = from_fields(
        "llama",
        {
            "layers.count": 32,
            "hidden": 4096,
            "attention.heads": 32,
            "attention.kv_heads": 32,
            "attention.head_dim": 128,
            "mlp.ffn": 11008,
            "vocab": 32000,
            "max_positions": 4096,
            "norm.epsilon": 1e-5,
            "positions.theta": 1e4,
        },
    )
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert flops_per_token(config, 4096) == 6 * (32 * layer + 32000 * 4096) + 12 * 32 * 4096 * 4096
    beside_adapters = flops_per_token(config, 4096, frozen=True, trains_head=True)
    assert beside_adapters == 4 * 32 * layer + 6 * 32000 * 4096 + 12 * 32 * 4096 * 4096
    of_scores = changed(config, SCORED)
    assert flops_per_token(of_scores, 4096) == 6 * 32 * layer + 12 * 32 * 4096 * 4096
    assert flops_per_token(of_scores, 4096, frozen=True) == 4 * 32 * layer + 12 * 32 * 4096 * 4096


def test_operations_of_layers_with_heads_of_their_own_are_counted_with_them() -> None:
    """The second embedding is looked up."""
    heads = {"layers.head_dim": (None, 512), "layers.kv_heads": (None, 2)}
    inputs = {"layer_inputs.width": 256, "layer_inputs.vocab": 32000}
    config = from_fields(
        "gemma4_text",
        {
            "layers.count": 2, "hidden": 2048, "attention.heads": 8, "attention.kv_heads": 4, "attention.head_dim": 256, "mlp.ffn": 8192,
            "vocab": 32000, "max_positions": 4096, "norm.epsilon": 1e-6, "tie_embeddings": True, **heads, **inputs,
        },
    )  # fmt: skip
    qkvo = 2048 * 2 * (8 * 256 + 4 * 256) + 2048 * 2 * (8 * 512 + 2 * 512)
    of_inputs = 2 * 256 * 2048 + 2 * 2 * 256 * 2048
    weights = qkvo + 2 * 3 * 2048 * 8192 + of_inputs + 32000 * 2048
    assert flops_per_token(config, 1024) == 6 * weights + 12 * 8 * (256 + 512) * 1024


def test_each_further_token_takes_the_head_once_more_though_it_is_tied() -> None:
    """A tied model has as many products as one with a head of its own."""
    untied = MODELS["further tokens"]
    tied = MODELS["further tokens, tied"]
    assert flops_per_token(tied, 16) == flops_per_token(untied, 16)


def test_layers_that_keep_their_values_take_no_operations() -> None:
    config = MODELS["further tokens"]
    without = changed(config, {"mtp_layers": 0})
    assert flops_per_token(config, 16, trains_mtp=False) == flops_per_token(without, 16)


def test_a_meter_divides_by_time_and_devices() -> None:
    meter = Meter(flops=1e9, devices=2, peak_tflops=1.0, total_samples=100)
    meter.add(4, 1000)
    meter.started -= 10
    figures = meter.read(20)
    assert figures["tokens_per_second"] == pytest.approx(50, rel=1e-3)
    assert figures["tflops"] == pytest.approx(0.05, rel=1e-3)
    assert figures["mfu"] == pytest.approx(0.05, rel=1e-3)
    assert figures["seconds_left"] == pytest.approx(200, rel=1e-3)
    assert duration(3723.4) == "1:02:03"
    assert math.isfinite(meter.read(20)["step_seconds"] or 0.0)


def test_a_step_of_gpt3_has_the_operations_that_nvidia_publishes() -> None:
    """The README of Megatron-LM: 32 seconds a step on 1024 GPUs are 138 teraFLOP/s. This counts recomputation."""
    gpt3 = from_fields(
        "gpt2",
        {
            "layers.count": 96, "hidden": 12288, "attention.heads": 96, "attention.kv_heads": 96, "attention.head_dim": 128,
            "mlp.ffn": 4 * 12288, "mlp.gated": False, "mlp.activation": "gelu", "vocab": 51200, "max_positions": 2048,
            "positions.kind": "learned", "tie_embeddings": True,
        },
    )  # fmt: skip
    with_recomputation = flops_per_token(gpt3, 2048) * 4 / 3
    per_gpu = with_recomputation * 1536 * 2048 / (1024 * 32)
    assert per_gpu / 1e12 == pytest.approx(138, rel=0.03)
