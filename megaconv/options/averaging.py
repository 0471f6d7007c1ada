"""The method by which `--average` combines several models."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaconv.errors import UsageError
from megaconv.options.option import VALUES, Range, normalize, option

METHODS = LINEAR, SLERP, TIES, DARE, DARE_TIES = ("linear", "slerp", "ties", "dare", "dare-ties")
"""The accepted values of `method`."""
OF_DIFFERENCES = (TIES, DARE, DARE_TIES)
"""Methods that add differences from the first model to it. A share is the weight of a difference."""
ELECTING = (TIES, DARE_TIES)
"""Methods that keep only elements of the sign that prevails."""
AT_RANDOM = (DARE, DARE_TIES)
"""Methods that keep elements at random."""

_COMMANDS = ("convert", "average")


@dataclass(frozen=True)
class AverageMethod:
    """The method of an average, and its settings."""

    method: str = option(
        LINEAR,
        "--method",
        heading=VALUES,
        commands=_COMMANDS,
        help="How an average is computed: linear (weighted sum), slerp (of two models, along an arc), or the first model plus "
        "parts of the others' differences from it: ties, dare or dare-ties.",
    )
    density: float | None = option(
        None,
        "--density",
        heading=VALUES,
        commands=_COMMANDS,
        help="The part of each difference that ties (the largest elements), dare and dare-ties (elements at random) keep, such as 0.2.",
    )
    """Above 0, at most 1; None for methods that keep everything."""
    seed: int = option(
        0,
        "--seed",
        heading=VALUES,
        commands=_COMMANDS,
        range=Range(0),
        help="The elements that dare and dare-ties keep depend on it.",
    )

    def __post_init__(self) -> None:
        normalize(self)
        if self.method not in METHODS:
            raise UsageError(f"--method {self.method}: expected one of {', '.join(METHODS)}")
        trims = self.method in OF_DIFFERENCES
        if trims and self.density is None:
            raise UsageError(
                f"--method {self.method} needs --density, the part of each difference to keep, such as 0.2"
            )
        if not trims and self.density is not None:
            raise UsageError(_without_effect("--density", self.method, OF_DIFFERENCES))
        if self.density is not None and not 0 < self.density <= 1:
            raise UsageError(f"--density {self.density:g}: expected a number above 0, at most 1")
        if self.seed and self.method not in AT_RANDOM:
            raise UsageError(_without_effect("--seed", self.method, AT_RANDOM))

    @property
    def is_usual(self) -> bool:
        """True for the weighted sum."""
        return self.method == LINEAR


def _without_effect(option: str, method: str, methods: Sequence[str]) -> str:
    """Return the message for an option of an average by other methods. `convert` may compute no average at all."""
    return (
        f"{option} has no effect with --method {method}; it belongs to an average "
        f"(convert --average, or average) with --method {' or '.join(methods)}"
    )
