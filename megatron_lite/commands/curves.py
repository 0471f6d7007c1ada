"""Curves of several runs: which values are drawn, and in how many points."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite

from megaconv.errors import UsageError
from megatron_lite.commands.run_logs import RunLog
from megatron_lite.loop.curve import Points

MOST_POINTS = 800
"""Points of a curve on a page. Each point of a longer curve is the mean of some steps."""


@dataclass(frozen=True)
class Measure:
    """A value that is drawn."""

    title: str
    unit: str = ""
    names: tuple[str, ...] = ()
    """Its names in a log. The second one, for example the validation loss, is drawn dashed in the same plot."""


USUAL = (
    Measure("loss", "nats a token", ("loss", "validation_loss")),
    Measure("learning rate", "", ("learning_rate",)),
    Measure("norm of the gradients, before clipping", "", ("grad_norm",)),
    Measure("speed", "tokens per second of a device", ("tokens_per_second",)),
)
"""Values that are drawn without --value, if the logs hold them."""


@dataclass(frozen=True)
class Curve:
    run: int
    """Number of the run."""
    points: Points
    second: bool = False


@dataclass(frozen=True)
class Plot:
    """The curves of one value."""

    measure: Measure
    curves: tuple[Curve, ...]

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        found = [step for curve in self.curves for step, _ in curve.points]
        return min(found), max(found)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest value."""
        found = [value for curve in self.curves for _, value in curve.points]
        return min(found), max(found)


def plots(runs: Sequence[RunLog], wanted: Sequence[str]) -> list[Plot]:
    """Return the plots of these values, or of the usual ones. Raises UsageError for a value that no run has."""
    names = sorted(set(chain.from_iterable(run.values for run in runs)))
    for name in wanted:
        if name not in names:
            raise UsageError(f"--value {name}: no run has logged it; there are {', '.join(names)}")
    measures = [Measure(name, "", (name,)) for name in wanted] or USUAL
    found = [Plot(measure, tuple(_curves(runs, measure))) for measure in measures]
    kept = [plot for plot in found if plot.curves]
    if not kept:
        raise UsageError(f"no run has logged a finite loss; choose by --value among {', '.join(names)}")  # fmt: skip
    return kept


def _curves(runs: Sequence[RunLog], measure: Measure) -> list[Curve]:
    found = []
    for which, name in enumerate(measure.names):
        for number, run in enumerate(runs):
            points = [(step, value) for step, value in run.values.get(name, ()) if isfinite(value)]
            if points:
                found.append(Curve(number, points, second=which > 0))
    return found
