"""A recipe that datatrove runs: each input file is a task, and tasks run in several processes.

    read the file -> steps that change or mark documents -> write kept and removed documents, in the file's order

The number of processes changes nothing in the output. A killed run leaves `.OUTPUT.partial`. `--resume` continues it:
datatrove leaves out the tasks that are complete. The output appears by one rename when all tasks are complete.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError, CorruptCheckpoint
from megaconv.errors import UsageError
from megaconv.extras import install
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.documents import Document, Reader, json_line
from megatron_lite.data.recipes.flags import RecipePlaces
from megatron_lite.data.recipes.outputs import (
    opened_for_writing,
    output_names,
    require_free,
    take_place,
)
from megatron_lite.data.recipes.removal import REASON, Report, Share
from megatron_lite.data.recipes.task_pool import TaskPool

PACKAGE = "datatrove"
SHOWN = 3
"""Examples of removed documents for each reason in the report."""
_SHOWN_CHARACTERS = 80
_ORIGINAL, _COUNTS, _OPTIONS = "fields", "counts", "options.json"

Step = Callable[..., Iterable[Any]]
"""A step of datatrove: step(documents, rank, world_size) yields documents. It has to be picklable."""


@dataclass
class PipelineReport(Report):
    """A report with examples. Bytes of kept documents are those of the changed texts."""

    examples: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    options: str = ""
    """A hash of the recipe's options."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            **super().as_json(), "examples": self.examples, "seconds": round(self.seconds, 1),
            "options": self.options, "packages": {PACKAGE: importlib.metadata.version(PACKAGE)},
        }  # fmt: skip

    def adds_up(self) -> bool:
        """Return whether each document that was read is kept or removed. Steps change the bytes of texts."""
        fates = [self.kept, *self.removed.values()]
        return self.read.documents == sum(share.documents for share in fates)


@dataclass(frozen=True)
class Run:
    """The files and options of a recipe."""

    places: RecipePlaces
    workers: int
    resume: bool
    options: Mapping[str, Any]
    """Everything that changes the output. A resumed run must have the same."""

    @property
    def partial(self) -> Path:
        """The directory of an unfinished run."""
        output = self.places.output.resolve()
        return output.with_name(f".{output.name}.partial")


@dataclass(frozen=True)
class ReadFile:
    """Reads the file of a task."""

    files: tuple[str, ...]
    reader: Reader
    counts: Path | None = None
    """Directory for the numbers of documents and bytes that were read."""

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        share, warnings = Share(), list[str]()
        reader = replace(self.reader, warn=warnings.append)
        documents = reader.documents(self.files[rank])
        for position, document in enumerate(documents):
            share.add(document.size)
            yield _for_datatrove(document, f"{rank}/{position}")
        if self.counts is not None:
            _write_counts(self.counts / f"{rank}.json", share, warnings)


def _write_counts(path: Path, share: Share, warnings: Sequence[str]) -> None:
    content = json.dumps([share.documents, share.bytes, warnings])
    path.write_text(content, encoding="utf-8")


def _for_datatrove(document: Document, name: str) -> Any:
    metadata = {_ORIGINAL: document.fields, "where": document.where}
    data = package("datatrove.data", "data")
    return data.Document(text=document.text, id=name, metadata=metadata)


@dataclass(frozen=True)
class WriteFile:
    """Writes the documents of a task: those that a step has marked are removed ones."""

    names: tuple[str, ...]
    key: str
    kept: Path
    removed: Path

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        name = self.names[rank]
        paths = self.kept / name, self.removed / name
        for path in paths:
            path.unlink(missing_ok=True)  # left by an interrupted task
        with opened_for_writing(paths[0]) as kept, opened_for_writing(paths[1]) as removed:
            for document in data:
                fields = document.metadata[_ORIGINAL]
                reason = document.metadata.get(REASON)
                where = document.metadata["where"]
                if reason is None:
                    kept.write(json_line({**fields, self.key: document.text}, where))
                else:
                    removed.write(json_line({**fields, REASON: reason}, where))
                yield document


def mark(document: Any, reason: str) -> None:
    """Mark a document as removed. Later steps leave it alone."""
    document.metadata[REASON] = reason


def is_marked(document: Any) -> bool:
    """Return whether an earlier step has removed the document."""
    return REASON in document.metadata


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run in several processes."""
    add = parser.add_argument_group("run").add_argument
    add(
        "--workers", type=int, default=1, metavar="N",
        help="processes; each works on one input file at a time (1)",
    )  # fmt: skip
    add("--resume", action="store_true", help="continue an interrupted run with the same flags")


def require_datatrove() -> None:
    """Raise UsageError if datatrove is not installed."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"this recipe needs {PACKAGE}; {install('data-recipes')}") from None


@dataclass(frozen=True)
class Stage:
    """Steps that run as a number of tasks. A stage begins when all tasks of the one before are complete."""

    steps: Sequence[Any]
    tasks: int


def perform(run: Run, stages: Callable[[Path], Iterable[Stage]]) -> PipelineReport:
    """Run all stages and return the report. stages: called with a directory for intermediate files.

    Raises CorruptCheckpoint, UsageError, TargetExists.
    """
    started = time.monotonic()
    places, partial = run.places, run.partial
    for target in (places.output, places.keep_removed):
        require_free(target, places.files, overwrite=places.overwrite)
    options = _prepare(run)
    with _stderr_in(partial / "log.txt"):
        for number, stage in enumerate(stages(partial)):
            _execute(stage, run.workers, partial / f"logs-{number}")
    report = _report(run)
    report.options, report.seconds = options, time.monotonic() - started
    place = ", ".join(places.files)
    if not report.read.documents:
        raise CorruptCheckpoint(f"{place}: there are no documents")
    if not report.adds_up():
        raise CheckpointError(f"{place}: kept and removed documents don't add up")
    for name, target in (("kept", places.output), ("removed", places.keep_removed)):
        target.parent.mkdir(parents=True, exist_ok=True)
        take_place(partial / name, target)
    shutil.rmtree(partial)
    return report


def first_and_last(run: Run) -> tuple[ReadFile, WriteFile]:
    """Return the first and the last step of a stage that writes the output."""
    places, partial = run.places, run.partial
    read = ReadFile(places.files, places.reader, partial / _COUNTS)
    names = tuple(output_names(places.files))
    return read, WriteFile(names, places.reader.key, partial / "kept", partial / "removed")


def _prepare(run: Run) -> str:
    """Make the directory of the run, or check that an interrupted run had the same options. Returns their hash."""
    partial, digest = run.partial, _hash_of(run)
    if partial.exists() and not run.resume:
        shutil.rmtree(partial)
    known = partial / _OPTIONS
    if known.exists() and known.read_text(encoding="utf-8") != digest:
        raise UsageError(f"{partial}: is of a run with other flags or files; leave --resume out")
    for name in ("kept", "removed", _COUNTS):
        (partial / name).mkdir(parents=True, exist_ok=True)
    known.write_text(digest, encoding="utf-8")
    return digest


def _hash_of(run: Run) -> str:
    """Return a hash of everything that changes the output."""
    places = run.places
    everything = {
        "files": [(file, Path(file).stat().st_size) for file in places.files],
        "key": places.reader.key,
        "skip": places.reader.skip_bad_lines,
        **run.options,
    }
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _execute(stage: Stage, workers: int, logs: Path) -> None:
    executors = package("datatrove.executor.local", "data")
    executor = executors.LocalPipelineExecutor(
        pipeline=list(stage.steps), tasks=stage.tasks, workers=1, logging_dir=str(logs)
    )
    workers = min(workers, stage.tasks)
    if workers == 1:
        executor.run()
        return
    with TaskPool(workers, "spawn", "give fewer --workers, and --resume") as pool:
        tasks = executor.get_incomplete_ranks()
        for _ in pool.imap_unordered(executor._run_for_rank, tasks):
            pass


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Send what this process and its children write to standard error into a file: datatrove reports every step."""
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def _report(run: Run) -> PipelineReport:
    """Count the documents in the outputs, and compare them later with what was read."""
    places, partial = run.places, run.partial
    report = PipelineReport()
    for path in sorted((partial / _COUNTS).iterdir()):
        documents, size, warnings = json.loads(path.read_text(encoding="utf-8"))
        report.read.documents += documents
        report.read.bytes += size
        for message in warnings:
            places.reader.warn(message)
    written = Reader(places.reader.key)
    for name in output_names(places.files):
        for document in written.documents(str(partial / "kept" / name)):
            report.kept.add(document.size)
        for document in written.documents(str(partial / "removed" / name)):
            reason = document.fields[REASON]
            report.removed.setdefault(reason, Share()).add(document.size)
            shown = report.examples.setdefault(reason, [])
            if len(shown) < SHOWN:
                shown.append(_shown(document))
    return report


def _shown(document: Document) -> str:
    start = document.text[:_SHOWN_CHARACTERS]
    return f"{document.fields['id']}: {start}" if "id" in document.fields else start
