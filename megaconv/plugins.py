"""Loaders, savers and model families that other packages bring, by entry points; docs/plugins.md says how to write them.

    [project.entry-points."megaconv.loaders"]
    mine = "my_package.my_loader"          # a module with DESCRIPTION, detect() and open()

A plugin that is broken must not stand in the way of those who don't ask for it: it is named in a warning, and left out.
"""

import logging
import os
import sys
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from megaconv.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger("megaconv")

_NEEDED = {"loaders": ("DESCRIPTION", "detect", "open"), "savers": ("DESCRIPTION", "plan"), "families": ("FAMILY",)}
"""What the module (or object) behind an entry point has to have, by the kind of plugin."""
_SINGULAR = {"loaders": "loader", "savers": "saver", "families": "family"}


def offered(kind: str) -> Mapping[str, "EntryPoint"]:
    """Entry points by name; nothing is imported. kind: `loaders`, `savers` or `families`."""
    return _offered(kind, tuple(sys.path))


def load(kind: str, entry: "EntryPoint") -> Any:
    """The module (or object) behind an entry point. Raises PluginError where it isn't what it should be."""
    package = entry.dist.name if entry.dist else "unknown"
    who = f"{_SINGULAR[kind]} {entry.name!r} of the package {package}"
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
        raise PluginError(f"{who}: can't be loaded from {entry.value} ({_one_line(error)})") from error
    lacking = [name for name in _NEEDED[kind] if not hasattr(found, name)]
    if lacking:
        raise PluginError(f"{who}: {entry.value} has no {', '.join(lacking)}; docs/plugins.md says what a plugin has")
    if kind == "families" and found.FAMILY.name != entry.name:  # headers and checkpoints know a family by its own name
        raise PluginError(f"{who}: its FAMILY is called {found.FAMILY.name!r}; the entry point needs the same name")
    return found


def usable(kind: str, ours: Collection[str]) -> Mapping[str, Any]:
    """All plugins of a kind that can be loaded, by name. Warns once of those that can't, or have a name of ours."""
    return _usable(kind, tuple(ours), tuple(sys.path))


def leave_out(kind: str, name: str, error: BaseException) -> None:
    """Warn of a plugin that failed where others may still serve."""
    _log.warning("%s %r is left out: %s", _SINGULAR[kind], name, _one_line(error))


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, PluginError) else f"{type(error).__name__}: {message}".removesuffix(": ")


# Both are asked for again and again during a run; other packages can come only with another sys.path.


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
                raise PluginError("megaconv has one of this name itself; the package has to give it another")
            found[name] = load(kind, entry)
        except PluginError as error:
            leave_out(kind, name, error)
    return found


@cache
def _any_offered(path: tuple[str, ...]) -> bool:
    """Whether any installed package has plugins: a look at a hundred small files takes 2 ms, importing importlib.metadata 35."""
    for place in path:
        try:
            with os.scandir(place or ".") as entries:
                infos = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
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
