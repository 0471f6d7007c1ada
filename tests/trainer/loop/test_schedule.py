"""Learning rate, weight decay and batch size against Megatron core's own."""

from dataclasses import replace

import pytest

from megaconv.errors import UsageError
from megatron_lite.loop.schedule import learning_rate, make_schedule, weight_decay
from megatron_lite.settings.config import Training
from megatron_lite.settings.optimization import Optimizer
from megatron_lite.settings.sizes import batch_size

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


def test_the_batch_grows_as_megatron_cores_does() -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    training = Training(
        global_batch_size=20, rampup_batch_size=(4, 4, 60), train_samples=400, micro_batch_size=2
    )
    ours = batch_size(training, 2)
    assert ours.sizes() == [4, 8, 12, 16, 20]
    theirs = RampupBatchsizeNumMicroBatchesCalculator(20, 2, 2, False, 0, 4, 4, 60)
    samples = 0
    while samples < 200:
        theirs.update(samples, consistency_check=False)
        assert ours.at(samples) == theirs.get_current_global_batch_size()
        samples += ours.at(samples)


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
