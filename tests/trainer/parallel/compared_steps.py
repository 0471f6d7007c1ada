"""Steps of a run beside those of plain torch, or of the same run in one process."""

from collections.abc import Iterable, Mapping, Sequence

import pytest
from torch import Tensor

from megatron_lite.rank.report import StepReport

TOLERANCE = 1e-5


def figures(report: StepReport) -> dict[str, float]:
    """The loss, the norm of the gradient, and all further figures of a step."""
    return {"loss": report.loss, "grad_norm": report.grad_norm, **report.others}


def require_figures(reports: Iterable[StepReport], expected: Iterable[Mapping[str, float]]) -> None:
    for report, theirs in zip(reports, expected, strict=True):
        assert figures(report) == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)


def require_matrices(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The gradient of a key bias is rounding alone, and Adam scales it up. So only matrices are compared."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.ndim > 1:
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


Result = tuple[list[StepReport], dict[str, Tensor]]
"""The reports of a rank's steps, and the weights after them."""


def require_as_alone(ranks: Sequence[Result], alone: Result) -> None:
    """alone: of one process."""
    expected, weights = alone
    for reports, found in ranks:
        require_figures(reports, map(figures, expected))
        require_matrices(found, weights)
