"""`megatron_lite data split`: divides a corpus at random into documents for training, test and validation.

A document's part follows from the seed and its number in the corpus alone.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.recipes.documents import json_line
from megatron_lite.data.recipes.flags import add_input, reader_of
from megatron_lite.data.recipes.outputs import opened_for_writing, staged_directory
from megatron_lite.data.recipes.removal import Share

DESCRIPTION = "Divide a corpus at random into documents for training, test and validation."
PARTS = ("train", "test", "valid")


@dataclass
class SplitReport:
    """Documents and bytes of each part."""

    parts: dict[str, Share] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "documents": sum(share.documents for share in self.parts.values()),
            "parts": {name: share.documents for name, share in self.parts.items()},
            "bytes": {name: share.bytes for name, share in self.parts.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        for name, share in self.parts.items():
            yield f"{name:24} {share.documents:14,} {share.bytes:18,} bytes"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_input(parser)
    add = parser.add_argument_group("output").add_argument
    add(
        "--output", type=local_path, required=True, metavar="DIR",
        help="directory for train.jsonl, test.jsonl and, with two fractions, valid.jsonl",
    )  # fmt: skip
    add(
        "--test-fraction", type=float, nargs="+", default=[0.05, 0.01], metavar="X",
        help="share of the documents for test, and that for validation (0.05 0.01)",
    )  # fmt: skip
    add("--seed", type=int, default=1234, metavar="N", help="of the division (1234)")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")
    add("--overwrite", action="store_true", help="replace an existing output")


def run(given: argparse.Namespace) -> SplitReport:
    """Divide the corpus. Raises CorruptCheckpoint, UsageError, TargetExists."""
    fractions: list[float] = given.test_fraction
    if len(fractions) > 2 or any(not 0 < each < 1 for each in fractions) or sum(fractions) >= 1:
        raise UsageError("--test-fraction: give one or two numbers above 0 whose sum is below 1")
    files, reader = reader_of(given)
    names = PARTS[: 1 + len(fractions)]
    bounds = np.cumsum(fractions)
    random = np.random.RandomState(given.seed)
    report = SplitReport({name: Share() for name in names})
    with (
        staged_directory(given.output, files, overwrite=given.overwrite) as directory,
        ExitStack() as stack,
    ):
        outputs = {
            name: stack.enter_context(opened_for_writing(directory / f"{name}.jsonl"))
            for name in names
        }
        for file in files:
            for document in reader.documents(file):
                part = names[_part(random.random_sample(), bounds)]
                outputs[part].write(json_line(document.fields, document.where))
                report.parts[part].add(document.size)
        if not sum(share.documents for share in report.parts.values()):
            raise CorruptCheckpoint(f"{', '.join(files)}: there are no documents")
    return report


def _part(drawn: float, bounds: Any) -> int:
    """Return the number of the part: 1 or 2 below the bounds, else 0, which is training."""
    place = int(np.searchsorted(bounds, drawn, side="right"))
    return 0 if place == len(bounds) else place + 1
