"""--manual-gc: Python's garbage is collected on all ranks at the same step; else each pauses when it likes, and the others wait for it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.settings.config import Training


class Garbage:
    """Nothing happens unless --manual-gc was given."""

    def __init__(self, training: Training) -> None:
        self._manual, self._interval = training.manual_gc, training.manual_gc_interval
        self._around_evaluations = training.manual_gc and not training.no_manual_gc_eval

    def start(self) -> None:
        """From now on it is collected at set times alone."""
        if self._manual:
            gc.disable()
            gc.collect()

    def after(self, iteration: int) -> None:
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Before and after; of what falls due in between, the youngest generation is the cheaper part."""
        if self._around_evaluations:
            gc.collect()
        yield
        if self._around_evaluations:
            gc.collect(generation=0)

    def end(self) -> None:
        if self._manual:
            gc.enable()
