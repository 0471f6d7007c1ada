"""The flags that all recipes share."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.local_paths import local_path, local_word
from megatron_lite.data.finetuning.records import find_files
from megatron_lite.data.recipes.documents import Reader
from megatron_lite.data.recipes.outputs import is_in, require_no_input


@dataclass(frozen=True)
class RecipePlaces:
    """The corpus and the outputs of a recipe."""

    files: tuple[str, ...]
    reader: Reader
    output: Path
    keep_removed: Path
    overwrite: bool


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the corpus."""
    add = parser.add_argument_group("corpus").add_argument
    add(
        "--input", type=local_word, nargs="+", required=True, metavar="FILE",
        help="JSON lines, parquet, plain text, also .gz, .zst; directories and patterns",
    )  # fmt: skip
    add("--text-key", default="text", metavar="KEY", help="field with the text (text)")
    add(
        "--skip-bad-lines",
        action="store_true",
        help="leave out, and report, lines that can't be read",
    )


def reader_of(given: argparse.Namespace) -> tuple[list[str], Reader]:
    """Return the files of the corpus and their reader. Raises UsageError for a missing file."""
    return find_files(given.input, "--input"), Reader(given.text_key, given.skip_bad_lines, _warn)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags of recipes from a corpus to a corpus."""
    add_input(parser)
    add = parser.add_argument_group("output").add_argument
    add(
        "--output", type=local_path, required=True, metavar="DIR",
        help="directory for the corpus, with the input's file names and compression",
    )  # fmt: skip
    add(
        "--keep-removed", type=local_path, metavar="DIR",
        help="directory for the removed documents, each with its reason (OUTPUT-removed)",
    )  # fmt: skip
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")
    add("--overwrite", action="store_true", help="replace existing outputs")


def recipe_places(given: argparse.Namespace) -> RecipePlaces:
    """Return the corpus and the outputs. Raises UsageError for a missing file."""
    output: Path = given.output
    beside = output.absolute().with_name(f"{output.absolute().name}-removed")
    removed: Path = given.keep_removed or beside
    found, reader = reader_of(given)
    files = tuple(found)
    _require_separate(files, output, removed)
    return RecipePlaces(
        files=files,
        reader=reader,
        output=output,
        keep_removed=removed,
        overwrite=given.overwrite,
    )


def _require_separate(files: Sequence[str], output: Path, removed: Path) -> None:
    """Raise UsageError if an output lies in the other one, or holds an input: it would replace what it reads."""
    if is_in(output, removed) or is_in(removed, output):
        raise UsageError(f"--keep-removed {removed}: overlaps with --output {output}")
    for place in (output, removed):
        require_no_input(place, files)


def _warn(message: str) -> None:
    print(f"megatron-lite: warning: {message}: left out", file=sys.stderr)
