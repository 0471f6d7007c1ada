"""`megatron-lite plot RUN ...`: the curves of runs side by side, in the terminal, as a page or as JSON."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaconv.commands.units import readable
from megaconv.errors import CheckpointError
from megaconv.json_text import json_text
from megaconv.local_paths import local_path, require_page
from megaconv.terminal import has_blocks, show
from megatron_lite.commands.curve_drawing import ASCII_MARKS, MARKS, characters
from megatron_lite.commands.curve_page import curve_page
from megatron_lite.commands.curves import Plot, plots
from megatron_lite.commands.run_logs import RunLog, read_runs
from megatron_lite.settings.flag_parser import FlagParser

DESCRIPTION = """\
Draw the loss, the learning rate, the norm of the gradients and the speed of runs.

RUN is a file of --metrics-file, a directory of --tensorboard-dir (also Megatron-LM's), or a directory that holds one metrics file.
NAME=RUN gives the run a name. --html writes a page, and prints no curves.
"""
EXAMPLES = """examples:
  megatron-lite plot metrics.jsonl
  megatron-lite plot small-lr=a/metrics.jsonl large-lr=b/metrics.jsonl --html curves.html
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = FlagParser(
        prog="megatron-lite plot",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="NAME",
        help="a logged value to draw in place of the usual ones; repeatable",
    )
    parser.add_argument("--html", metavar="FILE", help="write one page for a browser")
    parser.add_argument("--json", action="store_true", help="print all logged values for programs")
    return parser


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    given = make_parser().parse_args(words)
    try:
        page = None if given.html is None else local_path(given.html)
        if page is not None:
            require_page("--html", page)
        runs = read_runs(given.runs)
        found = plots(runs, given.value)
        if page is not None:
            page.write_text(curve_page(runs, found), encoding="utf-8")
    except CheckpointError as error:
        show(f"megatron-lite: error: {error}", sys.stderr)
        return error.exit_status
    except OSError as error:
        show(f"megatron-lite: error: {error.filename}: {error.strerror}", sys.stderr)
        return 1
    _print(runs, found, page, as_json=given.json)
    return 0


def _print(runs: Sequence[RunLog], found: Sequence[Plot], page: Path | None, *, as_json: bool) -> None:  # fmt: skip
    if as_json:
        print(json_text({"runs": [run.to_json() for run in runs]}, indent=2))
    elif page is not None:
        show(f"{page}: {readable(page.stat().st_size)}")
    else:
        for line in _lines(runs, found):
            show(line)


def _lines(runs: Sequence[RunLog], found: Sequence[Plot]) -> Iterator[str]:
    """Yield the lines for a terminal."""
    blocks = has_blocks()
    for plot in found:
        unit = f", {plot.measure.unit}" if plot.measure.unit else ""
        yield f"{plot.measure.title}{unit}"
        yield from characters(plot, blocks=blocks)
        yield ""
    if len(runs) > 1:
        marks = MARKS if blocks else ASCII_MARKS
        for number, run in enumerate(runs):
            yield f"{marks[number % len(marks)]} {run.name}"
