"""The results of `evaluate`: a table on the terminal, and JSON in a file. It does not import torch."""

import argparse
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.json_text import json_text
from megaconv.terminal import show
from megatron_lite.inference.evaluation import toxicity

Results = dict[str, dict[str, Any]]
"""Task -> measure -> value."""


def evaluate_toxicity(given: argparse.Namespace) -> Results:
    """Return the measures of `--toxicity`. Raises UsageError, CorruptCheckpoint."""
    if given.prompts is None:
        raise UsageError("--toxicity needs --prompts")
    return dict(toxicity.measure(given.toxicity, given.prompts, given.by))


def report(results: Results, model: str | None, output: str | None) -> None:
    """Print the results and write them to `output`. Raises UsageError if it can't be written.

    With `-`, standard output has the JSON alone, so that a program can read it.
    """
    if output == "-":
        print(_as_json(results, model))
        return
    for line in table(results):
        show(line)
    if output:
        try:
            Path(output).write_text(_as_json(results, model) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: can't be written: {error.strerror}") from error


def check_output(output: str | None) -> None:
    """Raise UsageError before a measurement whose results would have no place."""
    directory = Path(output or ".").parent
    if not directory.is_dir():
        raise UsageError(f"--output {output}: there is no directory {directory}")


def _as_json(results: Results, model: str | None) -> str:
    return json_text({"model": model, "results": results}, indent=1, default=str)


def table(results: Results) -> list[str]:
    """Return a line for each measure."""
    rows: list[tuple[str, str, str]] = []
    for task, measures in results.items():
        for name, value in measures.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                shown = f"{value:.6g}" if isinstance(value, float) else str(value)
                rows.append((task, name.removesuffix(",none"), shown))
    wide_task, wide_name, wide_value = (
        max((len(row[column]) for row in rows), default=0) for column in range(3)
    )
    return [
        f"{task.ljust(wide_task)}  {name.ljust(wide_name)}  {value.rjust(wide_value)}"
        for task, name, value in rows
    ]
