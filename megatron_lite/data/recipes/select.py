"""`megatron_lite data select`: keeps the records of a file with the lowest scores.

Rule and figures are those of Megatron-LM's examples/detxoify_lm: of N records, the N · SHARE with the lowest scores are
chosen. Records without a score count in N and are never chosen. Equal scores keep the file's order.
"""

import argparse
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import TargetExists, UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.recipes.outputs import opened_for_writing, partial_of
from megatron_lite.data.recipes.values import number_at

DESCRIPTION = "Keep the records with the lowest scores, as Megatron's detoxification does."
HIGH = 0.5
"""Scores above are reported as a group of their own."""


@dataclass
class Scored:
    """The scored lines of a file, without their contents."""

    records: int
    """All records, also those without a score."""
    scores: NDArray[np.float64]
    starts: NDArray[np.int64]
    """First byte of each scored line."""


@dataclass
class SelectReport:
    """Figures of the scores, before and after the choice."""

    records: int
    scores: NDArray[np.float64]
    chosen: NDArray[np.float64]

    def _groups(self) -> dict[str, NDArray[np.float64]]:
        high = self.scores[self.scores > HIGH]
        return {"all": self.scores, f"above {HIGH}": high, "chosen": self.chosen}

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        groups = {name: self._figures(values) for name, values in self._groups().items()}
        return {"records": self.records, "without_score": self.records - len(self.scores), **groups}

    def _figures(self, values: NDArray[np.float64]) -> dict[str, float | int | None]:
        some = len(values) > 0
        return {
            "records": len(values),
            "share": len(values) / len(self.scores),
            "mean": float(values.mean()) if some else None,
            "standard_deviation": float(values.std()) if some else None,
            "lowest": float(values.min()) if some else None,
            "highest": float(values.max()) if some else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        yield f"{self.records:,} records, {self.records - len(self.scores):,} without a score"
        for name, values in self._groups().items():
            figures = self._figures(values)
            line = f"{name:10} {len(values):10,} records ({figures['share']:.1%} of the scored)"
            if len(values):
                line += f"  {figures['mean']:.6f} ± {figures['standard_deviation']:.6f}"
                line += f"  from {figures['lowest']:.6f} to {figures['highest']:.6f}"
            yield line


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "--input", type=local_path, required=True, metavar="FILE",
        help="JSON lines with scores, not compressed",
    )  # fmt: skip
    add("--output", type=local_path, required=True, metavar="FILE", help="the chosen lines")
    add("--by", default="score.toxicity", metavar="FIELD", help="the score (score.toxicity)")
    add(
        "--lowest", type=float, default=0.5, metavar="SHARE",
        help="share of all records that is chosen (0.5)",
    )  # fmt: skip
    add("--shuffle", action="store_true", help="write in random order (the file's order)")
    add("--seed", type=int, default=1, metavar="N", help="of the random order (1)")
    add("--overwrite", action="store_true", help="replace an existing --output")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")


def run(given: argparse.Namespace) -> SelectReport:
    """Choose the records. Raises CorruptCheckpoint, UsageError, TargetExists."""
    _check(given)
    scored = read_scores(given.input, given.by)
    count = int(scored.records * given.lowest)
    lowest = np.argsort(scored.scores, kind="stable")[:count]
    random = np.random.RandomState(given.seed)
    chosen = random.permutation(lowest) if given.shuffle else np.sort(lowest)
    _copy_lines(given.input, scored.starts[chosen], given.output)
    return SelectReport(scored.records, scored.scores, scored.scores[chosen])


def _check(given: argparse.Namespace) -> None:
    if not 0 < given.lowest <= 1:
        raise UsageError(f"--lowest {given.lowest} must be above 0 and at most 1")
    if given.output.exists() and not given.overwrite:
        raise TargetExists(f"{given.output}: exists; choose another file, or pass --overwrite")
    if given.output.resolve() == given.input.resolve():
        raise UsageError(f"--output {given.output}: is the input too; choose another file")


def read_scores(path: Path, by: str) -> Scored:
    """Return the scores of a file of JSON lines. Raises UsageError, CorruptCheckpoint with the line."""
    scores, starts = array("d"), array("q")
    records = 0
    for number, start, line in _lines(path):
        records += 1
        score = number_at(_parsed(line, path, number), by, f"{path}:{number}")
        if score is not None:
            scores.append(score)
            starts.append(start)
    if not scores:
        raise CorruptCheckpoint(f"{path}: no record has a score in {by}; see --by")
    return Scored(records, np.array(scores), np.array(starts))


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, first byte, content) of each line that isn't blank. Raises UsageError for an unreadable file."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, start, line
                start += len(line)
    except OSError as error:
        raise UsageError(f"--input {path}: can't be read: {error.strerror}") from error


def _parsed(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}:{number}: is not JSON: {error}") from error


def _copy_lines(source: Path, starts: NDArray[np.int64], target: Path) -> None:
    """Write the lines that begin at these bytes. The output appears when it is complete."""
    partial = partial_of(target)
    partial.unlink(missing_ok=True)
    try:
        with source.open("rb") as file, opened_for_writing(partial) as output:
            for start in starts.tolist():
                file.seek(start)
                output.write(file.readline().rstrip(b"\n") + b"\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
