"""Schedules of a run: learning rate and weight decay, as functions of the number of samples.

Formulas and conventions are Megatron-LM's (megatron/core/optimizer_param_scheduler.py). A step uses the values for the
samples before it, and a skipped step doesn't count.
"""

from dataclasses import dataclass, replace
from math import cos, pi, sqrt
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megatron_lite.settings.config import Training
from megatron_lite.settings.optimization import Optimizer


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `highest`, then a decay to `lowest`; all lengths in samples."""

    highest: float
    lowest: float
    initial: float
    warmup: int
    decay: int
    """The sample at which the lowest rate is reached, warm-up included."""
    style: str
    wsd_style: str = "exponential"
    wsd_decay: int = 0
    """Length of the last phase of WSD."""

    def at(self, samples: int) -> float:
        """Return the learning rate after so many samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.highest - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.highest
        if samples > self.decay:
            return self.lowest
        if self.style == "inverse-square-root":
            return max(
                self.lowest, self.highest * sqrt(max(self.warmup, 1)) / sqrt(max(samples, 1))
            )
        return self.lowest + self._height(samples) * (self.highest - self.lowest)

    def _height(self, samples: int) -> float:
        """Return 1 at the highest rate, 0 at the lowest."""
        if self.style == "WSD":
            style = self.wsd_style
            begun = samples - (self.decay - self.wsd_decay)
            if begun <= 0:
                return 1.0
            part = begun / self.wsd_decay
        else:
            style = self.style
            part = (samples - self.warmup) / (self.decay - self.warmup)
        if style == "exponential":
            return float(2.0 * 0.5**part - 1.0)
        return {
            "linear": 1.0 - part,
            "cosine": 0.5 * (cos(pi * part) + 1.0),
            "minus_sqrt": 1.0 - sqrt(part),
        }[style]


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that grows from `start` to `end` over `samples`."""

    start: float
    end: float
    samples: int
    style: str

    def at(self, samples: int) -> float:
        """Return the weight decay after so many samples."""
        if self.style == "constant" or samples > self.samples:
            return self.end
        part = samples / self.samples
        return self.start + (self.end - self.start) * (
            part if self.style == "linear" else 0.5 * (cos(pi * (1.0 - part)) + 1.0)
        )


class Rates(NamedTuple):
    """The rates of one step."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None
    """The rate of embedding and head; None: lr."""


@dataclass(frozen=True)
class Schedule:
    """The schedules of a run."""

    rate: LearningRate
    decay: WeightDecay
    decoupled: LearningRate | None = None
    """The schedule of embedding and head, if they have a separate learning rate."""

    def at(self, samples: int) -> Rates:
        """Return the rates of the step after so many samples."""
        decoupled = None if self.decoupled is None else self.decoupled.at(samples)
        return Rates(self.rate.at(samples), self.decay.at(samples), decoupled)

    def state(self, samples: int) -> dict[str, Any]:
        """Return the state in the form of Megatron's OptimizerParamScheduler in checkpoints."""
        rate, decay = self.rate, self.decay
        return {
            "max_lr": rate.highest, "lr_warmup_steps": rate.warmup, "num_steps": samples, "lr_decay_style": rate.style,
            "lr_decay_steps": rate.decay, "min_lr": rate.lowest, "start_wd": decay.start, "end_wd": decay.end,
            "wd_incr_style": decay.style, "wd_incr_steps": decay.samples,
        }  # fmt: skip


def make_schedule(optimizer: Optimizer, training: Training, batch: int, samples: int) -> Schedule:
    """Return the schedule. batch: the full global batch size. samples: of the whole run. Raises UsageError."""
    rate = learning_rate(optimizer, training, batch)
    return Schedule(
        rate, weight_decay(optimizer, samples), decoupled_learning_rate(optimizer, rate)
    )


def decoupled_learning_rate(optimizer: Optimizer, rate: LearningRate) -> LearningRate | None:
    """Return the schedule of embedding and head, or None. rate: the schedule of all other parameters, whose form it has.

    Raises UsageError if the lowest rate is above the highest, or if only the lowest is given.
    """
    highest, lowest = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if highest is None:
        if lowest is not None:
            raise UsageError("--decoupled-min-lr needs --decoupled-lr")
        return None
    lowest = rate.lowest if lowest is None else lowest
    if not 0 <= lowest <= highest:
        name = "--min-lr" if optimizer.decoupled_min_lr is None else "--decoupled-min-lr"
        raise UsageError(f"{name} {lowest:g} has to lie between 0 and --decoupled-lr {highest:g}")
    return replace(rate, highest=highest, lowest=lowest)


def learning_rate(optimizer: Optimizer, training: Training, batch: int) -> LearningRate:
    """Return the learning rate. batch: the full global batch size. Raises UsageError for lengths that contradict each other."""
    if optimizer.lr is None or not 0 <= optimizer.min_lr <= optimizer.lr:
        raise UsageError(
            "--lr is missing"
            if optimizer.lr is None
            else f"--min-lr {optimizer.min_lr:g} has to lie between 0 and --lr {optimizer.lr:g}"
        )
    if training.train_samples is not None:
        decay = optimizer.lr_decay_samples or training.train_samples
        warmup, last = optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples or 0
    else:
        decay = (optimizer.lr_decay_iters or training.train_iters or 0) * batch
        warmup = optimizer.lr_warmup_iters * batch
        last = (optimizer.lr_wsd_decay_iters or 0) * batch
    if optimizer.lr_warmup_fraction is not None:
        warmup = int(optimizer.lr_warmup_fraction * decay)
    if warmup and warmup >= decay:
        raise UsageError(
            f"the warm-up of {warmup} samples has to end before the decay of {decay} does (of these, {batch} make a step)"
        )
    if optimizer.lr_decay_style == "WSD" and not 0 < last <= decay - warmup:
        raise UsageError(
            f"--lr-decay-style WSD needs --lr-wsd-decay-iters or -samples of 1 to {decay - warmup} samples, found {last}"
        )
    return LearningRate(
        optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_init, warmup, decay,
        optimizer.lr_decay_style, optimizer.lr_wsd_decay_style, last,
    )  # fmt: skip


def weight_decay(optimizer: Optimizer, samples: int) -> WeightDecay:
    """Return the weight decay. samples: of the whole run. Raises UsageError if an end of the ramp is missing."""
    if optimizer.weight_decay_incr_style == "constant":
        if optimizer.start_weight_decay is not None or optimizer.end_weight_decay is not None:
            raise UsageError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
            )
        return WeightDecay(optimizer.weight_decay, optimizer.weight_decay, samples, "constant")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if start is None or end is None or not 0 <= start <= end:
        raise UsageError(
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs --start-weight-decay and "
            f"--end-weight-decay, the second not smaller; found {start} and {end}"
        )
    return WeightDecay(start, end, samples, optimizer.weight_decay_incr_style)
