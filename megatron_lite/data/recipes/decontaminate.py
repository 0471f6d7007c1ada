"""`megatron_lite data decontaminate`: removes the texts of evaluation tasks from a corpus.

The rules and the defaults are those of Megatron-LM's tools/openwebtext/filter_ngrams.py:

1. Count the tasks' n-grams in the corpus. An n-gram that occurs often is common language and is not removed.
2. Cut each other n-gram out of its document, with some characters on both sides, up to the end of a sentence.
3. Drop short pieces, and documents that fall into many pieces.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from megaconv.errors import UsageError
from megatron_lite.data.finetuning.records import find_files
from megatron_lite.data.recipes.documents import Document, Reader, texts_of
from megatron_lite.data.recipes.flags import RecipePlaces, add_common, recipe_places
from megatron_lite.data.recipes.ngrams import Finder, NgramSizes, count, ngrams_of
from megatron_lite.data.recipes.removal import Corpus, Report

DESCRIPTION = "Remove the texts of evaluation tasks from a corpus (Megatron's filter_ngrams)."
MANY_PIECES, SHORT_PIECES = "many-pieces", "short-pieces"
_SENTENCE_ENDS = ".!?"


@dataclass(frozen=True)
class Cutting:
    """The amounts to cut and to keep. The fields are flags of the command, with Megatron's defaults."""

    key_threshold: int = 10
    """An n-gram with at least this many counts is common."""
    remove_char_each_side: int = 200
    filter_text_char_len: int = 200
    """A piece must have more characters than this."""
    splits_count: int = 10
    """A document with more pieces is removed."""


@dataclass(frozen=True)
class Task:
    """An evaluation task and the files with its texts."""

    name: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """The result of counting the tasks' n-grams in the corpus."""

    finder: Finder
    """Finds the n-grams that aren't common."""
    suspects: set[int]
    """Numbers of the documents with an n-gram, from 1. Only they are searched again."""

    def pieces(self, number: int, text: str, cutting: Cutting) -> list[str] | None:
        """Return what is left of a document; None if nothing is cut."""
        if number not in self.suspects:
            return None
        return pieces_of(text, self.finder, cutting)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_common(parser)
    add = parser.add_argument_group("tasks").add_argument
    add(
        "--against", nargs="+", required=True, metavar="[NAME=]FILE",
        help="files with the tasks' texts: JSON lines, parquet or plain text. NAME stands in split_id (the file's name)",
    )  # fmt: skip
    add("--against-key", default="text", metavar="KEY", help="field with a task's text (text)")
    sizes, cutting = NgramSizes(), Cutting()
    numbers = {
        "--min-ngram-size": (sizes.shortest, "words of the shortest n-gram"),
        "--max-ngram-size": (sizes.longest, "words of an n-gram"),
        "--key-threshold": (cutting.key_threshold, "counts that make an n-gram common"),
        "--remove-char-each-side": (cutting.remove_char_each_side, "characters cut on each side"),
        "--filter-text-char-len": (cutting.filter_text_char_len, "a piece needs more characters"),
        "--splits-count": (cutting.splits_count, "a document with more pieces is removed"),
    }
    group = parser.add_argument_group("Megatron's constants")
    for flag, (default, text) in numbers.items():
        group.add_argument(flag, type=int, default=default, help=f"{text} ({default})")


def run(given: argparse.Namespace) -> Report:
    """Decontaminate the corpus. Raises CorruptCheckpoint, UsageError, TargetExists."""
    places = recipe_places(given)
    sizes = NgramSizes(given.min_ngram_size, given.max_ngram_size)
    cutting = Cutting(
        given.key_threshold,
        given.remove_char_each_side,
        given.filter_text_char_len,
        given.splits_count,
    )
    _require_sizes(sizes, cutting)
    tasks = tasks_of(given.against)
    search = _search(tasks, Reader(given.against_key), places, sizes, cutting)
    prefix = "-".join(task.name for task in tasks)
    with Corpus(places) as corpus:
        for number, document in enumerate(corpus.documents(), 1):
            pieces = search.pieces(number, document.text, cutting)
            _write(corpus, document, pieces, cutting, f"{prefix}-{number:010d}")
        corpus.finish()
    return corpus.report


def _require_sizes(sizes: NgramSizes, cutting: Cutting) -> None:
    if not 1 <= sizes.shortest <= sizes.longest:
        raise UsageError(
            f"--min-ngram-size {sizes.shortest}: expected 1 to --max-ngram-size, {sizes.longest}"
        )
    negative = [name for name, value in vars(cutting).items() if value < 0]
    if negative:
        flag = negative[0].replace("_", "-")
        raise UsageError(f"--{flag} {vars(cutting)[negative[0]]}: expected 0 or more")


def tasks_of(words: Sequence[str]) -> list[Task]:
    """Return the tasks of `--against NAME=FILE` or `--against FILE`. Raises UsageError for a missing file."""
    tasks: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, file = _name_and_file(word)
        files = tuple(find_files([file], "--against"))
        tasks[name] = (*tasks.get(name, ()), *files)
    return [Task(name, files) for name, files in tasks.items()]


def _name_and_file(word: str) -> tuple[str, str]:
    name, equals, file = word.partition("=")
    is_named = equals and name and "/" not in name and not Path(word).exists()
    if is_named:
        return name, file
    return PurePath(word).name.partition(".")[0], word


def _search(
    tasks: Sequence[Task], reader: Reader, places: RecipePlaces, sizes: NgramSizes, cutting: Cutting
) -> Search:
    """Search the corpus for the tasks' n-grams, and leave out those that are common in it."""
    files = [file for task in tasks for file in task.files]
    ngrams = ngrams_of(texts_of(reader, files), sizes)
    if not ngrams:
        raise UsageError(
            f"--against {' '.join(files)}: no text has {sizes.shortest} words or more, so nothing can be searched"
        )
    all_ngrams = Finder(ngrams, sizes.longest)
    counts: Counter[str] = Counter()
    suspects: set[int] = set()
    for number, text in enumerate(texts_of(places.reader, places.files), 1):
        if count(all_ngrams, text, counts):
            suspects.add(number)
    common = {ngram for ngram, number in counts.items() if number >= cutting.key_threshold}
    return Search(Finder(ngrams - common, sizes.longest), suspects)


def pieces_of(text: str, finder: Finder, cutting: Cutting) -> list[str] | None:
    """Return the pieces of a text that are left, in order; None for a text without n-grams.

    The list ends early if it has too many pieces.
    """
    hit = finder.first(text)
    if hit is None:
        return None
    margin = cutting.remove_char_each_side
    shortest = cutting.filter_text_char_len
    pieces: list[str] = []
    while hit is not None:
        before = _before(text, hit.start - margin)
        text = _behind(text, hit.end + margin)
        if len(before) > shortest:
            pieces.append(before)
        if len(text) <= shortest or len(pieces) > cutting.splits_count:
            return pieces
        hit = finder.first(text)
    return [*pieces, text]


def _before(text: str, position: int) -> str:
    """Return the text up to the last end of a sentence at or before a position. A text's first character is no end."""
    while position > 0 and text[position] not in _SENTENCE_ENDS:
        position -= 1
    return text[: position + 1] if position > 0 else ""


def _behind(text: str, position: int) -> str:
    """Return the text behind the first end of a sentence at or after a position."""
    while position < len(text) and text[position] not in _SENTENCE_ENDS:
        position += 1
    return text[position + 1 :]


def _write(
    corpus: Corpus, document: Document, pieces: list[str] | None, cutting: Cutting, split_id: str
) -> None:
    if pieces is None:
        corpus.keep(document, {**document.fields, "split_id": f"{split_id}-0000"})
    elif not pieces:
        corpus.remove(document, SHORT_PIECES)
    elif len(pieces) > cutting.splits_count:
        corpus.remove(document, MANY_PIECES)
    else:
        corpus.split(document, list(_records(document, pieces, corpus.key, split_id)))


def _records(
    document: Document, pieces: Sequence[str], key: str, split_id: str
) -> Iterator[dict[str, object]]:
    for number, piece in enumerate(pieces):
        yield {**document.fields, key: piece, "split_id": f"{split_id}-{number:04d}"}
