"""Refuses places for an output that would replace something unintended, before anything is read."""

import os
from collections.abc import Iterable
from pathlib import Path

from formats.partial_files import displayed
from formats.stores.addresses import is_store, place_of
from megaconv import registry
from megaconv.engine.nested import require_nothing_else
from megaconv.errors import CheckpointError, TargetExists, UsageError
from megaconv.local_paths import UNEXPANDED, is_unexpanded, local_path
from megaconv.store_inputs import parsed, stand_in


def refuse_place(target: str | Path) -> None:
    """Raises UsageError for an output path that is refused.

    These are: an empty path, a URI, a path with an unexpanded `~`, the working directory, and a directory that contains
    it.
    """
    if not str(target):
        raise UsageError("the output's path is empty; is a variable unset that it was made of?")
    if is_store(str(target)):
        return
    local_path(target)
    if is_unexpanded(target):
        raise UsageError(f"{target}: {UNEXPANDED}; give the path in full")
    here, place = Path.cwd(), _real(target)
    if place == here or place in here.parents:
        what = (
            "is the working directory" if place == here else f"holds the working directory {here}"
        )
        raise UsageError(
            f"{target}: {what}; an output never replaces it. Choose a directory inside it or next to it"
        )


def refuse_loss(
    target: str | Path,
    source: Path | str,
    others: Iterable[Path | str | None],
    record: str,
    *,
    overwrite: bool,
) -> None:
    """Raises UsageError if the output would replace an input, TargetExists if it would replace a non-checkpoint.

    source: a path, or a URI, which is no local place. others: further inputs, or None. record: the file that every
    output of megaconv has.
    """
    if is_store(str(target)):
        _refuse_own_source(str(target).rstrip("/"), (source, *others))
        if overwrite:
            _require_checkpoint(str(target), record)
        return
    place, sources = _real(target), [source] if isinstance(source, Path) else []
    if any(_real(path) in place.parents for path in sources):
        raise UsageError(f"{target}: lies in the source {source}; choose a place outside of it")
    for path in (*sources, *(other for other in others if other is not None)):
        if place == _real(path) or place in _real(path).parents:
            what = "is" if place == _real(path) else "holds"
            raise UsageError(
                f"{target}: {what} the source {path}, which it would replace; choose another place"
            )
    occupied = any(place.iterdir()) if place.is_dir() else place.exists()
    if occupied and not (place / record).is_file() and not _is_checkpoint(place):
        raise TargetExists(
            f"{target}: --overwrite replaces checkpoints, and this is not one of a known format (it has no {record} either); "
            "remove it yourself, or choose another place"
        )
    if overwrite and place.is_dir():
        require_nothing_else(target, place, record)


def _refuse_own_source(target: str, sources: Iterable[Path | str | None]) -> None:
    """Raises UsageError if an output in a store is, holds or lies in an input, however their URIs are spelled."""
    output = _place(target)
    for path in sources:
        shown = displayed(str(path)).rstrip("/") if path is not None else ""
        if not is_store(shown):
            continue
        place = _place(shown)
        if place[: len(output)] == output:
            raise UsageError(
                f"{target}: is or holds the source {shown}, which it would replace; choose another place"
            )
        if output[: len(place)] == place:
            raise UsageError(f"{target}: lies in the source {shown}; choose a place outside of it")


def _place(uri: str) -> tuple[str, ...]:
    """The place that a URI names."""
    from formats.stores.az import account_of_environment

    return place_of(parsed(uri), account_of_environment())


def _require_checkpoint(target: str, record: str) -> None:
    """Raises TargetExists if objects would be replaced that are no checkpoint."""
    try:
        occupant = stand_in(target)
    except CheckpointError as error:
        if error.code in ("no-such-input", "incomplete-output"):
            return
        raise
    if not (occupant / record).is_file() and not _is_checkpoint(occupant):
        raise TargetExists(
            f"{target}: --overwrite replaces checkpoints, and this is not one of a known format (it has no {record} either); "
            "remove it yourself, or choose another place"
        )
    require_nothing_else(target, occupant, record)


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _is_checkpoint(path: Path) -> bool:
    try:
        found = registry.detect(path)
    except CheckpointError:
        return False
    return found.name != "config"  # a config.json alone may lie in any program's directory
