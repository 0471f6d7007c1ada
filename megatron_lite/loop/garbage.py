"""--manual-gc: all ranks collect Python's garbage at the same step.

Without it, each rank pauses at a different time and the other ranks wait for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.settings.config import Training


class Garbage:
    """Does nothing unless --manual-gc is given."""

    def __init__(self, training: Training) -> None:
        self._manual, self._interval = training.manual_gc, training.manual_gc_interval
        self._around_evaluations = training.manual_gc and not training.no_manual_gc_eval

    def start(self) -> None:
        """Disable automatic collection. From now on only this class collects."""
        if self._manual:
            gc.disable()
            gc.collect()

    def after(self, iteration: int) -> None:
        """Collect if it is due after this iteration."""
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect before and after an evaluation. Afterwards only the youngest generation is collected, which is cheaper."""
        if self._around_evaluations:
            gc.collect()
        yield
        if self._around_evaluations:
            gc.collect(generation=0)

    def end(self) -> None:
        """Enable automatic collection again."""
        if self._manual:
            gc.enable()
