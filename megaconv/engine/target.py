"""Where an output may not go, since it would replace what nobody meant: reported before anything is read."""

import os
from collections.abc import Iterable
from pathlib import Path

from megaconv import registry
from megaconv.errors import CheckpointError, TargetExists, UsageError
from megaconv.hub import UNEXPANDED, is_unexpanded


def refuse_place(target: str | Path) -> None:
    """Raises UsageError for no path at all, one in a home directory that nobody looked up, the working directory and what it lies in."""
    if not str(target):
        raise UsageError("the output's path is empty; is a variable unset that it was made of?")
    if is_unexpanded(target):
        raise UsageError(f"{target}: {UNEXPANDED}; give the path in full")
    here, place = Path.cwd(), _real(target)
    if place == here or place in here.parents:
        what = "is the working directory" if place == here else f"holds the working directory {here}"
        raise UsageError(f"{target}: {what}, which an output doesn't replace; choose a place in or beside it")


def refuse_loss(target: str | Path, source: Path | str, others: Iterable[Path | None], record: str) -> None:
    """Raises UsageError where the source or another input would be replaced, TargetExists for what is no checkpoint.

    source: a path, or a URI, which is nowhere here. others: what else is read, or None. record: the file that every output of ours has.
    """
    place, sources = _real(target), [source] if isinstance(source, Path) else []
    if any(_real(path) in place.parents for path in sources):
        raise UsageError(f"{target}: lies in the source {source}; choose a place outside of it")
    for path in (*sources, *(other for other in others if other is not None)):
        if place == _real(path) or place in _real(path).parents:
            what = "is" if place == _real(path) else "holds"
            raise UsageError(f"{target}: {what} the source {path}, which it would replace; choose another place")
    occupied = any(place.iterdir()) if place.is_dir() else place.exists()
    if occupied and not (place / record).is_file() and not _is_checkpoint(place):
        raise TargetExists(
            f"{target}: --overwrite replaces checkpoints, and this is not one of a known format (it has no {record} either); "
            "remove it yourself, or choose another place"
        )


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _is_checkpoint(path: Path) -> bool:
    try:
        name, _ = registry.detect(path)
    except CheckpointError:
        return False
    return name != "config"  # which may lie in any program's directory
