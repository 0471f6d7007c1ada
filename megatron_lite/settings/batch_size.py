"""The global batch size of each step: constant, grown in a ramp, or set at given numbers of tokens.

Source: num_microbatches_calculator.py of Megatron core 0.16 (the ramp) and 0.19 (the schedule of steps).
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from megaconv.errors import UsageError
from megatron_lite.settings.config import Training


@dataclass(frozen=True)
class BatchSize:
    """Sequences of a step with Megatron-LM's ramp-up: from `start` by `increment` to `full`, over `samples`."""

    full: int
    start: int
    increment: int = 0
    samples: int = 0

    def at(self, samples: int) -> int:
        """Return the batch size of the step after so many samples."""
        if self.start == self.full or samples > self.samples:
            return self.full
        each = self.samples / ((self.full - self.start) // self.increment)
        return min(self.full, self.start + int(samples / each) * self.increment)

    def sizes(self) -> list[int]:
        """Return every batch size of the run."""
        return (
            [*range(self.start, self.full, self.increment), self.full]
            if self.increment
            else [self.full]
        )


@dataclass(frozen=True)
class BatchSchedule:
    """Sequences of a step with Megatron-LM's schedule of steps."""

    steps: tuple[tuple[int, int], ...]
    """(samples, batch size): from so many samples on, steps have this size. The first has 0 samples."""

    @property
    def full(self) -> int:
        """The last batch size."""
        return self.steps[-1][1]

    def at(self, samples: int) -> int:
        """Return the batch size of the step after so many samples."""
        return [size for first, size in self.steps if first <= samples][-1]

    def sizes(self) -> list[int]:
        """Return every batch size of the run."""
        return [size for _, size in self.steps]


def batch_size(training: Training, dp: int, seq: int) -> BatchSize | BatchSchedule:
    """Return the batch sizes. seq: tokens of a sequence. Raises UsageError for an impossible ramp-up or schedule."""
    if training.step_batch_size_schedule is not None:
        return _schedule(training.step_batch_size_schedule, training, seq)
    full = training.global_batch_size or training.micro_batch_size * dp
    if training.rampup_batch_size is not None:
        return _ramp(training.rampup_batch_size, training, full)
    return BatchSize(full, full)


def _ramp(rampup: tuple[int, ...], training: Training, full: int) -> BatchSize:
    if len(rampup) != 3:
        raise UsageError("--rampup-batch-size takes three numbers: START INCREMENT SAMPLES")
    start, increment, samples = rampup
    growth = full - start
    is_positive = min(start, increment, samples, growth) >= 1
    if not is_positive or growth % increment:
        raise UsageError(
            f"--rampup-batch-size {start} {increment} {samples}: {full} (the global batch) - {start} = {growth} "
            f"must be a positive multiple of {increment}"
        )
    _require_samples(training, "--rampup-batch-size")
    return BatchSize(full, start, increment, samples)


_STEP = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _schedule(text: str, training: Training, seq: int) -> BatchSchedule:
    flag = "--step-batch-size-schedule"
    for name in ("global_batch_size", "rampup_batch_size"):
        if getattr(training, name) is not None:
            other = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} gives every batch size; leave out {other}")
    _require_samples(training, flag)
    words = text.replace(",", " ").split()
    found = [_STEP.fullmatch(word) for word in words]
    steps = [
        (int(Decimal(step[1]) * _UNITS[step[2].upper()]) // seq, int(step[3]))
        for step in found
        if step
    ]
    firsts = [first for first, _ in steps]
    if not steps or None in found:
        raise UsageError(f'{flag} "{text}": expected TOKENS:SIZE ..., such as "0:768 250B:1536"')
    if firsts[0] != 0:
        raise UsageError(f'{flag} "{text}": the first size must be that of 0 tokens')
    if any(later <= earlier for earlier, later in pairwise(firsts)):
        raise UsageError(
            f'{flag} "{text}": each number of tokens must be larger than the one before it, by a sequence of {seq} at least'
        )
    return BatchSchedule(tuple(steps))


def _require_samples(training: Training, flag: str) -> None:
    if training.train_samples is None:
        raise UsageError(
            f"{flag} counts in samples: give --train-samples in place of --train-iters or --epochs"
        )
