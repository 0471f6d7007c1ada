"""A checkpoint as a repository of the Hub: names, sizes and tags of its files, and their bytes.

A revision is one state of the model: `main`, an iteration of a Megatron run such as `iter_0000100`, or the revision's
own identity. The identity derives from the state of the source's files and from the plan. It is a hash of metadata, not
of contents: a source that changes gets another one, and its bytes are no longer served.
"""

import json
from collections.abc import Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from threading import Lock

from formats import rank_files
from formats.opened import OpenedFiles
from formats.wording import counted
from megaconv import registry
from megaconv._version import __version__
from megaconv.engine.preparation import prepare
from megaconv.errors import UsageError
from megaconv.input import find_input
from megaconv.model.ir import Header, Source
from megaconv.options import ConvertOptions
from megaconv.serving.planned_file import PlannedFile, planned_files

MAIN = "main"
"""The revision that clients ask for by default: the iteration that the run's tracker names."""


@dataclass(frozen=True)
class Revision:
    """One state of a model, as the files of a Hugging Face directory."""

    sha: str
    """40 hexadecimal digits, as a commit of the Hub has."""
    place: Path
    """The local path of the source, or what stands for its URI."""
    source: Source
    files: Mapping[str, PlannedFile]
    opened: OpenedFiles
    """The state of the source's files when they were opened."""
    context: Context
    """The context in which files that are opened later are recorded in `opened` too."""

    @property
    def header(self) -> Header:
        """The model's configuration and the shapes of its tensors."""
        return self.source.header

    def tag(self, name: str) -> str:
        """The ETag of a file. It differs for other states of the source, other plans and other files."""
        return sha1(f"{self.sha}\0{name}".encode()).hexdigest()

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes of a file, in any thread. Raises CorruptCheckpoint if the source has changed since it was opened."""
        found = self.context.copy().run(self.files[name].read, start, stop)
        self.opened.require_unchanged()
        return found


class Repository:
    """A checkpoint under a name. Revisions are opened when they are first asked for."""

    def __init__(self, name: str, path: str, options: ConvertOptions) -> None:
        """Opens the main revision. Raises CheckpointError, before anything is served."""
        self.name, self.path, self._options = name, path, options
        self._lock = Lock()
        self._revisions = {MAIN: open_revision(path, options)}

    @cached_property
    def iterations(self) -> tuple[str, ...]:
        """Names of a Megatron run's iterations."""
        return tuple(rank_files.iterations(self._revisions[MAIN].place))

    def revision(self, name: str) -> Revision | None:
        """A revision by its name or identity; None if there is none. Raises CheckpointError if it can't be read."""
        with self._lock:
            for known, found in self._revisions.items():
                if name in (known, found.sha):
                    return found
            if name not in self.iterations:
                return None
            opened = open_revision(str(self._revisions[MAIN].place / name), self._options)
            self._revisions[name] = opened
            return opened


def open_revision(path: str, options: ConvertOptions) -> Revision:
    """A checkpoint as a Hugging Face directory that is not written. Raises CheckpointError.

    Files that the source opens later are checked for changes too.
    """
    opened = OpenedFiles()
    with opened:
        found = find_input(path, options.loader, options.load)
        source, report = prepare(found, f"{path}-served", registry.saver("hf"), options)
        files = planned_files(report.plan, dict(source.tensors()))
        context = copy_context()
    identity = [__version__, report.plan.identity(), opened.listing(), opened.inode_changes()]
    sha = sha1(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Revision(sha, Path(found.place), source, files, opened, context)


def open_repositories(
    paths: list[str], names: list[str], options: ConvertOptions
) -> dict[str, Repository]:
    """The repositories by name. Raises UsageError for names that don't fit, CheckpointError for unreadable checkpoints."""
    if names and len(names) != len(paths):
        raise UsageError(
            f"--name: {counted(len(names), 'name')} for {counted(len(paths), 'checkpoint')}; give one for each, in the same order, or none"
        )
    chosen = names or [f"local/{Path(path.rstrip('/')).name or 'model'}" for path in paths]
    found: dict[str, Repository] = {}
    for name, path in zip(chosen, paths, strict=True):
        _check_name(name)
        if name in found:
            raise UsageError(f"--name: {name} stands for two checkpoints; give each its own name")
        found[name] = Repository(name, path, options)
    return found


def _check_name(name: str) -> None:
    owner, _, model = name.partition("/")
    words = (owner, model)
    if not all(word.strip(".") and set(word) <= _LETTERS for word in words):
        raise UsageError(
            f"--name {name!r}: expected OWNER/MODEL, each of letters, digits, `-`, `_` and `.`"
        )


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
