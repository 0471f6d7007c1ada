"""Loaders, savers, model families and training objectives of other packages, by entry points; see docs/plugins.md.

    [project.entry-points."megaconv.loaders"]
    mine = "my_package.my_loader"          # a module with LOADER, or my_package.my_loader:LOADER

A broken plugin must not stop a command that doesn't use it: a warning names the plugin, and the plugin is left out.
"""

import logging
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from megaconv.errors import PluginError
from megaconv.loader import Loader
from megaconv.saver import Saver

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger("megaconv")


class _Kind(NamedTuple):
    """A kind of plugin."""

    word: str
    """The word for messages."""
    attribute: str
    """The attribute of the module behind an entry point."""
    record: type[Loader] | type[Saver] | None = None
    """The type of the attribute; None if a module without the attribute can't be used."""
    has_name: bool = True
    """True if the attribute has a name, which must be that of its entry point."""


_KINDS = {
    "loaders": _Kind("loader", "LOADER", Loader),
    "savers": _Kind("saver", "SAVER", Saver),
    "families": _Kind("family", "FAMILY"),
    "objectives": _Kind("objective", "OBJECTIVE", has_name=False),
}


def offered(kind: str) -> Mapping[str, "EntryPoint"]:
    """Entry points by name. Imports nothing. kind: one of _KINDS."""
    return _offered(kind, tuple(sys.path))


def load(kind: str, entry: "EntryPoint") -> Any:
    """The object behind an entry point: a Loader, a Saver, a Family or an objective of the trainer.

    Raises PluginError if the module can't be imported, has no complete record, or has a record of another name.
    """
    package = entry.dist.name if entry.dist else "unknown"
    who = f"{_KINDS[kind].word} {entry.name!r} of the package {package}"
    try:
        loaded = entry.load()
    except (
        Exception,
        SystemExit,
    ) as error:  # the import of another package's module may raise anything
        raise PluginError(
            f"{who}: can't be loaded from {entry.value} ({_one_line(error)})"
        ) from error
    _, attribute, record, has_name = _KINDS[kind]
    found = getattr(loaded, attribute, loaded)
    if record is not None and not isinstance(found, record):
        found = _record_of(found, record, entry, who)
    elif found is loaded and record is None:
        raise PluginError(
            f"{who}: {entry.value} has no {attribute}; docs/plugins.md says what a plugin has"
        )
    if has_name and found.name != entry.name:  # commands, headers and checkpoints use the name
        raise PluginError(
            f"{who}: its {attribute} is called {found.name!r}; the entry point needs the same name"
        )
    return found


def _record_of(
    found: object, record: type[Loader] | type[Saver], entry: "EntryPoint", who: str
) -> Loader | Saver:
    """The record of a module (or object) without one, whose functions and constants have the names of the fields.

    The names of constants are in capitals: DESCRIPTION, OPTIONS, HOLDS_OPTIMIZER.
    """
    given: dict[str, Any] = {"name": entry.name}
    lacking: list[str] = []
    for field in fields(record):
        spellings = [name for name in (field.name, field.name.upper()) if hasattr(found, name)]
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name == "name":
            continue
        if spellings:
            given[field.name] = getattr(found, spellings[0])
        elif is_needed:
            lacking.append(field.name)
    if lacking:
        raise PluginError(
            f"{who}: {entry.value} has no {', '.join(lacking)}; docs/plugins.md lists the parts of a plugin"
        )
    return record(**given)


def usable(kind: str, ours: Collection[str]) -> Mapping[str, Any]:
    """All usable plugins of a kind, by name.

    Warns once about a broken plugin, or one with a name that megaconv uses.
    """
    return _usable(kind, tuple(ours), tuple(sys.path))


def leave_out(kind: str, name: str, error: BaseException) -> None:
    """Warn about a plugin that failed, and continue without it."""
    _log.warning("%s %r is left out: %s", _KINDS[kind].word, name, _one_line(error))


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return (
        message
        if isinstance(error, PluginError)
        else f"{type(error).__name__}: {message}".removesuffix(": ")
    )


# The results are cached: a run asks for them many times, and only a different sys.path can bring other packages.


@cache
def _offered(kind: str, path: tuple[str, ...]) -> Mapping[str, "EntryPoint"]:
    if not _any_offered(path):
        return {}
    from importlib import metadata

    found: dict[str, EntryPoint] = {}
    for entry in metadata.entry_points(group=f"megaconv.{kind}"):
        found.setdefault(entry.name, entry)
    return found


@cache
def _usable(kind: str, ours: tuple[str, ...], path: tuple[str, ...]) -> Mapping[str, Any]:
    found = {}
    for name, entry in _offered(kind, path).items():
        try:
            if name in ours:
                raise PluginError(
                    "megaconv has one of this name itself; the package has to give it another"
                )
            found[name] = load(kind, entry)
        except PluginError as error:
            leave_out(kind, name, error)
    return found


@cache
def _any_offered(path: tuple[str, ...]) -> bool:
    """True if any installed package has plugins.

    A look at a hundred small files takes 2 ms; the import of importlib.metadata takes 35 ms.
    """
    for place in path:
        try:
            with os.scandir(place or ".") as entries:
                infos = [
                    entry.path
                    for entry in entries
                    if entry.name.endswith((".dist-info", ".egg-info"))
                ]
        except NotADirectoryError:
            return True  # a zip file, which importlib.metadata can look into
        except OSError:
            continue
        if any(_offers(f"{info}/entry_points.txt") for info in infos):
            return True
    return False


def _offers(file: str) -> bool:
    try:
        with open(file, "rb") as entry_points:  # noqa: PTH123  a Path for each would take twice as long
            return b"[megaconv." in entry_points.read()
    except OSError:
        return False
