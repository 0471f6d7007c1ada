"""Learning rate, weight decay and batch size against Megatron core's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UsageError
from megatron_lite.loop.schedule import learning_rate, make_schedule, weight_decay
from megatron_lite.settings.batch_size import batch_size
from megatron_lite.settings.config import Training
from megatron_lite.settings.optimization import Optimizer
from tests.megatron_oracle import installed_minor
from tests.trainer.loop.launches import LLAMA, metrics, train

pytestmark = pytest.mark.oracle

STYLES = [
    {"lr_decay_style": "constant"},
    {"lr_decay_style": "linear", "lr_warmup_iters": 3, "min_lr": 1e-4},
    {"lr_decay_style": "cosine", "lr_warmup_iters": 3, "min_lr": 1e-4, "lr_warmup_init": 1e-5},
    {"lr_decay_style": "cosine", "lr_decay_iters": 12, "lr_warmup_fraction": 0.25},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "min_lr": 3e-4},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 5, "lr_warmup_iters": 2, "min_lr": 1e-5}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    STYLES,
    ids=lambda flags: f"{flags['lr_decay_style']}-{flags.get('lr_wsd_decay_style', '')}",
)
@pytest.mark.parametrize("decay_style", ["constant", "linear", "cosine"])
def test_rates_are_those_of_megatron_core_at_every_step(
    flags: dict[str, float], decay_style: str
) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch, iters = 4, 20
    ramp = (
        {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
        if decay_style != "constant"
        else {"weight_decay": 0.05}
    )
    optimizer = Optimizer(lr=1e-3, weight_decay_incr_style=decay_style, **flags, **ramp)
    optimizer = replace(optimizer, decoupled_lr=3e-4, decoupled_min_lr=2e-5)
    schedule = make_schedule(optimizer, Training(train_iters=iters), batch, iters * batch)
    rate, decay = schedule.rate, schedule.decay

    class Holder:
        param_groups = [{"wd_mult": 1.0}, {"wd_mult": 1.0, "max_lr": 3e-4, "min_lr": 2e-5}]  # noqa: RUF012

    theirs = OptimizerParamScheduler(
        Holder(), init_lr=rate.initial, max_lr=rate.highest, min_lr=rate.lowest, lr_warmup_steps=rate.warmup,
        lr_decay_steps=rate.decay, lr_decay_style=rate.style, start_wd=decay.start, end_wd=decay.end,
        wd_incr_steps=decay.samples, wd_incr_style=decay.style, wsd_decay_steps=rate.wsd_decay,
        lr_wsd_decay_style=rate.wsd_style,
    )  # fmt: skip
    for step in range(iters + 3):
        group, decoupled = Holder.param_groups
        expected = group["lr"], group["weight_decay"], decoupled["lr"]
        assert schedule.at(step * batch) == pytest.approx(expected, rel=1e-12), step
        theirs.step(batch)


@pytest.mark.skipif(installed_minor() >= 19, reason="core 0.19 has a schedule in place of the ramp")
def test_the_batch_grows_as_megatron_cores_does() -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    training = Training(
        global_batch_size=20, rampup_batch_size=(4, 4, 60), train_samples=400, micro_batch_size=2
    )
    ours = batch_size(training, 2, 32)
    assert ours.sizes() == [4, 8, 12, 16, 20]
    theirs = RampupBatchsizeNumMicroBatchesCalculator(20, 2, 2, False, 0, 4, 4, 60)
    samples = 0
    while samples < 200:
        theirs.update(samples, consistency_check=False)
        assert ours.at(samples) == theirs.get_current_global_batch_size()
        samples += ours.at(samples)


SCHEDULES = ["0:4", "0:4 700:8 2k:12", "0:4,0.7K:8,0.002M:12", "0:12 1000:4"]


@pytest.mark.skipif(installed_minor() < 19, reason="core has the schedule since 0.19")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_batch_has_the_sizes_of_megatron_cores_schedule(schedule: str) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    ours = batch_size(scheduled(schedule), 2, 32)
    theirs = StepBatchsizeNumMicroBatchesCalculator(2, 2, False, 0, schedule, 32)
    assert ours.full == theirs.global_batch_size
    for samples in range(80):
        theirs.update(samples, consistency_check=False)
        assert ours.at(samples) == theirs.get_current_global_batch_size()


def scheduled(schedule: str, **others: Any) -> Training:
    return Training(step_batch_size_schedule=schedule, train_samples=400, **others)


@pytest.mark.parametrize("schedule", SCHEDULES[1:3])
def test_a_schedules_tokens_are_whole_sequences(schedule: str) -> None:
    """700 tokens are 21 sequences of 32 and a part of one."""
    ours = batch_size(scheduled(schedule), 2, 32)
    assert ours.sizes() == [4, 8, 12]
    assert [ours.at(samples) for samples in (0, 20, 21, 61, 62, 1000)] == [4, 4, 8, 8, 12, 12]


@pytest.mark.parametrize(
    ("schedule", "others", "message"),
    [
        ("", {}, "expected TOKENS:SIZE"),
        ("0:4 700", {}, "expected TOKENS:SIZE"),
        ("0:4 7G:8", {}, "expected TOKENS:SIZE"),
        ("0:0", {}, "expected TOKENS:SIZE"),
        ("0:-4", {}, "expected TOKENS:SIZE"),
        ("700:8", {}, "the first size must be that of 0 tokens"),
        ("0:4 700:8 701:12", {}, "by a sequence of 32 at least"),
        ("0:4 700:8 300:12", {}, "must be larger than the one before it"),
        ("0:4", {"global_batch_size": 4}, "leave out --global-batch-size"),
        ("0:4", {"rampup_batch_size": (4, 4, 60)}, "leave out --rampup-batch-size"),
    ],
)
def test_an_impossible_schedule_is_refused(
    schedule: str, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        batch_size(scheduled(schedule, **others), 2, 32)


def test_a_schedule_needs_a_length_in_samples() -> None:
    with pytest.raises(UsageError, match="give --train-samples"):
        batch_size(Training(step_batch_size_schedule="0:4", train_iters=5), 2, 32)


def test_a_run_keeps_its_place_in_the_schedule(tmp_path: Path) -> None:
    """Steps of 2, 2, 4, 4 and 8 sequences; a run that stops after the third goes on with the fourth."""
    model = LLAMA.replace("--global-batch-size 4 ", "").replace("--lr-warmup-iters 1 ", "")
    schedule = "--train-samples 20 --step-batch-size-schedule 0:2,64:4,192:8"
    flags = f"pretrain {model} {schedule} --save ckpt"
    train(tmp_path / "straight", 1, flags)
    for more in ("--exit-interval 3", "--resume"):
        train(tmp_path / "stopped", 1, f"{flags} {more}")
    straight, stopped = (metrics(tmp_path / name) for name in ("straight", "stopped"))
    assert [line["loss"] for line in straight] == [line["loss"] for line in stopped]
    assert [line["consumed_samples"] for line in straight] == [2, 4, 8, 12, 20]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--lr is missing"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "--min-lr 0.01 has to lie between 0 and --lr 0.001"),
        (
            {"lr": 1e-3, "lr_warmup_iters": 20},
            "the warm-up of 80 samples has to end before the decay of 80",
        ),
        ({"lr": 1e-3, "lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters"),
        ({"lr": 1e-3, "decoupled_min_lr": 1e-5}, "--decoupled-min-lr needs --decoupled-lr"),
        (
            {"lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 1e-5},
            "--min-lr 0.0001 has to lie between 0 and --decoupled-lr 1e-05",
        ),
        (
            {"lr": 1e-3, "decoupled_lr": 1e-5, "decoupled_min_lr": 1e-4},
            "--decoupled-min-lr 0.0001 has to lie between 0 and",
        ),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(
    flags: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_schedule(Optimizer(**flags), Training(train_iters=20), 4, 80)


def test_a_weight_decay_that_grows_needs_both_ends() -> None:
    with pytest.raises(UsageError, match="needs --start-weight-decay"):
        weight_decay(Optimizer(weight_decay_incr_style="linear"), 80)
    with pytest.raises(UsageError, match="need --weight-decay-incr-style"):
        weight_decay(Optimizer(start_weight_decay=0.1), 80)


def test_samples_count_in_a_run_with_train_samples() -> None:
    optimizer = Optimizer(
        lr=1.0, lr_decay_style="linear", lr_warmup_samples=10, lr_decay_samples=110
    )
    rate = learning_rate(optimizer, Training(train_samples=500), 4)
    assert [rate.at(samples) for samples in (0, 5, 10, 60, 110, 200)] == [
        0.0,
        0.5,
        1.0,
        0.5,
        0.0,
        0.0,
    ]
