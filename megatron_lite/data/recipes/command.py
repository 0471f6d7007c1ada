"""`megatron_lite data RECIPE`: prepares a corpus of text before `preprocess`."""

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from megaconv.errors import CheckpointError, Interrupted, UsageError
from megaconv.terminal import in_words
from megatron_lite.data.recipes import (
    answers,
    clean,
    decontaminate,
    dedup,
    questions,
    run_file,
    score,
    select,
    split,
    tokenizer,
    urls,
)
from megatron_lite.settings.flag_parser import FlagParser

RECIPES: dict[str, ModuleType] = {
    "clean": clean,
    "dedup": dedup,
    "decontaminate": decontaminate,
    "split": split,
    "urls": urls,
    "tokenizer": tokenizer,
    "score": score,
    "select": select,
    "questions": questions,
    "answers": answers,
    "run": run_file,
}
"""Name -> module with DESCRIPTION, add_flags(parser) and run(flags), which returns a report."""


class Report(Protocol):
    """The result of a recipe."""

    def lines(self) -> Iterable[str]:
        """Return the lines of a table."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        ...


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all recipes."""
    parser = FlagParser(
        prog="megatron-lite data",
        description="Prepare a corpus of text.",
        allow_abbrev=False,
    )
    recipes = parser.add_subparsers(dest="name_of_recipe", required=True, metavar="RECIPE")
    for name, recipe in RECIPES.items():
        description = recipe.DESCRIPTION
        inner = recipes.add_parser(
            name, help=description, description=description, allow_abbrev=False
        )
        recipe.add_flags(inner)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe and return the exit status: 0 done, 1 failed, 2 wrong usage, 3 bad input, 130 interrupted."""
    handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(make_parser().parse_args(arguments))
    except CheckpointError as error:
        return _fail(str(error), error.exit_status)
    except OSError as error:
        return _fail(in_words(error), 1)
    except (KeyboardInterrupt, Interrupted):
        return _fail(
            "interrupted; the recipes with --resume can continue, others leave nothing behind", 130
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def _run(given: argparse.Namespace) -> None:
    if given.report is not None:
        _check_report(given.report)
    report: Report = RECIPES[given.name_of_recipe].run(given)
    for line in report.lines():
        print(line)
    if given.report is not None:
        _write_report(given.report, report)


def _check_report(path: Path) -> None:
    """Raise UsageError if the report can't be written, or would replace a file that isn't a report."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--report {path}: its directory doesn't exist; create it first")
    if not path.is_file():
        return
    with path.open("rb") as file:
        first_line = file.readline(4)
    if first_line not in (b"", b"{\n"):
        raise UsageError(
            f"--report {path}: exists and is no report, which alone is replaced; choose another name"
        )


def _write_report(path: Path, report: Report) -> None:
    path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise Interrupted


def _fail(message: str, status: int) -> int:
    print(f"megatron-lite: error: {message}", file=sys.stderr)
    return status
