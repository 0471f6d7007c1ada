"""The documentation lists the errors that the planner has today, and the planner stays near the published runs."""

from pathlib import Path
from statistics import median

import pytest

from benchmarks.planner import error_of, table
from benchmarks.published_runs import RUNS

ROOT = Path(__file__).parents[2]


def test_the_documented_errors_are_those_of_the_planner() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for line in table():
        assert line in page, (
            "run python -m benchmarks.planner errors, and put its table into docs/planning.md"
        )


@pytest.mark.parametrize("fitted", [True, False])
def test_half_of_the_estimates_are_within_a_tenth(fitted: bool) -> None:
    """This holds for the runs to which constants are fitted, and for all other runs."""
    errors = [abs(error_of(run)) for run in RUNS if run.fitted == fitted]
    assert len(errors) > 8
    assert median(errors) < 0.1
