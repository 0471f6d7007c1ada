"""`RUN/best`: the iteration with the lowest validation loss, which a run with --keep-best records beside its iterations.

tuned/best_checkpointed_iteration.txt        10
tuned/best                                   the same as tuned/iter_0000010
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats import rank_files
from formats.ceilings import TRACKER_BYTES
from formats.errors import CorruptCheckpoint
from formats.opened import not_recorded
from formats.regular_files import read_small
from megaconv.errors import CheckpointError, UsageError
from megaconv.store_inputs import is_store, parsed, writable_store

if TYPE_CHECKING:
    from formats.stores.writing import WritableStore

NAME = "best"
_STORE_REFUSED = "store-refused"


@dataclass(frozen=True)
class _Run:
    """The directory of a run, or its prefix in a store."""

    place: str
    names: frozenset[str]
    """Names of the directories and files in it."""
    read: Callable[[], bytes]
    """Returns the content of the file that names the best iteration."""

    @property
    def record(self) -> str:
        """The place of that file."""
        return f"{self.place}/{rank_files.BEST}"

    @property
    def other(self) -> str:
        """Advice to name another iteration, if there is one."""
        saved = sorted(filter(rank_files.is_version, self.names))
        return f"; name an iteration, such as {self.place}/{saved[-1]}" if saved else ""


def with_best(place: str) -> str:
    """Return RUN/iter_0000010 for RUN/best, and any other place unchanged. An input that has the name `best` comes first.

    Raises UsageError if the run has recorded no best iteration, CorruptCheckpoint if the record is damaged or names an
    iteration that isn't there, CheckpointError for a store that can't be asked.
    """
    given = place.rstrip("/")
    if given.rpartition("/")[2] != NAME:
        return place
    run = _stored(given) if is_store(given) else _local(Path(given))
    return place if run is None else f"{run.place}/{_recorded(run)}"


def _recorded(run: _Run) -> str:
    """Return the name of the best iteration's directory."""
    if rank_files.BEST not in run.names:
        raise UsageError(
            f"{run.place}/{NAME}: there is no {run.record}, which a run with --keep-best writes{run.other}",
            code="no-such-input",
        )
    word = run.read().decode("utf-8", "replace").strip()
    if not rank_files.is_number(word):
        # The message doesn't repeat the content: the file may be a link to a private one.
        raise CorruptCheckpoint(
            f"{run.record}: should hold an iteration number, found {len(word)} characters of something else{run.other}"
        )
    version = rank_files.iteration_directory(int(word))
    if version not in run.names:
        raise CorruptCheckpoint(
            f"{run.record}: says {word}, but there is no {run.place}/{version}{run.other}",
            code="missing-file",
        )
    return version


def _is_run(names: frozenset[str]) -> bool:
    holds_iterations = any(map(rank_files.is_version, names))
    return NAME not in names and (rank_files.BEST in names or holds_iterations)


def _local(path: Path) -> _Run | None:
    """Return the run around a path, or None."""
    root = path.parent
    try:
        names = frozenset(entry.name for entry in root.iterdir())
    except OSError:
        return None
    return _Run(str(root), names, lambda: _read(root)) if _is_run(names) else None


def _read(root: Path) -> bytes:
    with not_recorded():
        # A running job may change the file meanwhile. The iteration that is read stays the same.
        return read_small(root / rank_files.BEST, TRACKER_BYTES)


def _stored(place: str) -> _Run | None:
    """Return the run around a URI, or None. One level is listed."""
    store, prefix = writable_store(place), parsed(place).prefix.removesuffix(NAME)
    try:
        level = store.listing(prefix, deep=False)
    except CheckpointError as error:
        if error.code != _STORE_REFUSED:
            raise
        return None  # the credentials don't allow to list the level above
    sizes = {each.key.removeprefix(prefix): each.size for each in level.objects}
    folders = (folder.removeprefix(prefix).rstrip("/") for folder in level.folders)
    names = frozenset((*sizes, *folders))
    if not _is_run(names):
        return None
    root = place.removesuffix(f"/{NAME}")
    size = sizes.get(rank_files.BEST, 0)
    return _Run(root, names, lambda: _fetch(store, f"{prefix}{rank_files.BEST}", size))


def _fetch(store: "WritableStore", key: str, size: int) -> bytes:
    """Return the content of a small object; nothing of a large one, which is no record."""
    found = store.get(key) if size <= TRACKER_BYTES else None
    return b"" if found is None else found.content
