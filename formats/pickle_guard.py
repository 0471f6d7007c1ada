"""Reads pickles into plain values and inert records, without running anything in them."""

import logging
import struct
from argparse import Namespace
from collections.abc import Collection
from mmap import mmap

from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.pickle_errors import MalformedError, UnsafeCallError
from formats.pickle_globals import TensorHook
from formats.pickle_machine import Machine, PersistentHook
from formats.pickle_records import (
    Global,
    NumpyArray,
    NumpyDtype,
    Opaque,
    StorageType,
    TensorRecord,
    TorchDtype,
)
from formats.pickle_run import run
from formats.wording import counted

__all__ = [
    "Global", "NumpyArray", "NumpyDtype", "Opaque", "StorageType", "TensorRecord", "TorchDtype", "check_tree", "load", "load_at",
]  # fmt: skip

_log = logging.getLogger("megaconv")

LIMIT_DEPTH = 100
"""Maximum depth of containers within containers."""

_MOST_WARNINGS = 10
"""Maximum number of names for which a file gets a warning each."""

_BROKEN = (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, struct.error)
"""Errors that bad bytes cause inside the machine. MalformedError is a ValueError."""


def load(
    data: bytes,
    persistent: PersistentHook | None = None,
    *,
    source: str,
    tensor: TensorHook | None = None,
) -> object:
    """The object in a pickle that fills `data`.

    persistent: a hook that makes a storage (or another value) from a persistent identity. Without it, no identity is
    allowed.
    source: the file's name in error messages.
    tensor: a hook that converts a TensorRecord to the value in its place.

    OrderedDicts and similar classes become dicts, torch.Size becomes a tuple, paths become strings, and numpy numbers
    become Python numbers. An argparse.Namespace stays a Namespace. Other objects become Opaque; classes and functions
    become Global.

    Recursive functions can walk the result: lists, tuples, dicts and namespaces are at most LIMIT_DEPTH deep and hold
    no cycles. The content of an Opaque may be deeper or hold cycles.

    Raises CorruptCheckpoint for bytes that are not a pickle, and UnsafeContent for a pickle that asks to run code.
    Calls under torch's or numpy's names become Opaque. A warning names the calls that no known
    checkpoint needs.
    """
    value, end = load_at(data, 0, persistent, source, tensor)
    if end != len(data):
        raise CorruptCheckpoint(
            f"{source}: {len(data) - end} bytes too many after the pickle; was the file changed?"
        )
    return value


def load_at(
    data: bytes | mmap,
    offset: int,
    persistent: PersistentHook | None,
    source: str,
    tensor: TensorHook | None = None,
    *,
    warns: bool = True,
) -> tuple[object, int]:
    """The object in the pickle that starts at offset, and the offset after it. In all else it is like `load`.

    warns: False for a pickle that is read once more afterwards.
    """
    machine = Machine(data, offset, persistent or _no_storages, tensor or _as_it_is)
    try:
        value = run(machine)
        check_tree(value, max(1_000_000, 16 * (machine.position - offset)))
    except UnsafeCallError as error:
        raise UnsafeContent(f"{source}: {error}") from None
    except _BROKEN as error:
        reason = (
            f"{error!s:.200}"
            if isinstance(error, MalformedError)
            else f"{type(error).__name__}: {error!s:.200}"
        )
        raise CorruptCheckpoint(
            f"{source}: a broken pickle near byte {machine.position}: {reason}; copy or save the file again"
        ) from error
    unusual = sorted(machine.unusual) if warns else []
    for name in unusual[:_MOST_WARNINGS]:
        _log.warning(
            "%s: asks to call %s, which no checkpoint needs; it was not called, and its result is left out",
            source,
            name,
        )
    if len(unusual) > _MOST_WARNINGS:
        others = counted(len(unusual) - _MOST_WARNINGS, "other name")
        _log.warning("%s: asks to call %s too; megaconv scan lists them", source, others)
    return value, machine.position


def _no_storages(identity: object) -> object:
    raise MalformedError("a reference to storages outside the pickle")


def _as_it_is(record: TensorRecord) -> object:
    return record


def check_tree(root: object, limit: int = 1_000_000) -> None:
    """Raise MalformedError for cycles, too many levels, and shared parts that multiply to more than `limit` values when
    walked. The content of an Opaque is not looked at."""
    # (levels, values) of each container that holds others, by identity, as soon as the containers below it are known
    sizes: dict[int, tuple[int, int]] = {}
    path, on_path = [root], set[int]()
    looked_at: dict[int, bool] = {}

    def holds_containers(node: object) -> bool:
        """True if a container holds containers. Results for long containers are cached, since a short pickle may refer
        to one endlessly. Short ones are many, and fast to scan."""
        if id(node) in looked_at:
            return looked_at[id(node)]
        parts = _parts(node)
        found = any(type(part) in _CONTAINERS for part in parts)
        if len(parts) > _LONG:
            looked_at[id(node)] = found
        return found

    # A depth-first walk without recursion. The first visit pushes the containers inside, the second one sums up.
    while path:
        node = path[-1]
        if id(node) in sizes:
            path.pop()
            continue
        parts = _parts(node)
        inner = [part for part in parts if type(part) in _CONTAINERS and holds_containers(part)]
        if id(node) not in on_path:
            on_path.add(id(node))
            if len(on_path) > LIMIT_DEPTH:
                raise MalformedError("containers are nested too deeply")
            if any(id(part) in on_path for part in inner):
                raise MalformedError("a container that contains itself")
            path += inner
            continue
        levels = 1
        values = len(parts)
        for part in parts:
            if type(part) in _CONTAINERS:
                levels_below, values_below = sizes.get(id(part)) or (1, len(_parts(part)))
                levels = max(levels, 1 + levels_below)
                values += values_below
        if levels > LIMIT_DEPTH or values > limit:
            raise MalformedError("containers are nested too deeply")
        sizes[id(node)] = levels, values
        on_path.discard(id(node))


_CONTAINERS = (dict, list, tuple, Namespace)
_LONG = 32


def _parts(node: object) -> Collection[object]:
    if isinstance(node, Namespace):
        return vars(node).values()
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, (list, tuple)) else ()
