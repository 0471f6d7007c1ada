"""A directory of stand-ins for the objects below a prefix of a store.

    s3://bucket/run/iter_0000100/…      <temporary>/run/iter_0000100/…

The names in a listing are not trusted: they become paths only if each of their parts is a plain name.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from formats.errors import CheckpointError, UnsafeContent
from formats.partial_files import RemoteState, register_root
from formats.stores.addresses import is_plain
from formats.stores.objects import Listed, Store
from formats.stores.stand_in import StandIn

_THREADS = 16
CLAIM, JOURNAL = ".megaconv-partial.json", ".megaconv-journal"
"""Names of what a run that writes leaves beside its output until it ends."""
_PER_ARRAY = (".zarray",)
"""Names of small files that every array of a checkpoint has. The first read of one fetches all."""

_SMALL_OBJECT_BYTES = 1 << 20
"""Objects up to this size are fetched together with others like them. A `.zarray` has 300 bytes."""


def open_directory(
    store: Store,
    prefix: str,
    beside: Sequence[str],
    check_claim: Callable[[str], None] = lambda place: None,
) -> Path | None:
    """The local path that stands for an object, or for the objects below a prefix. None if there are none.

    beside: names of directories next to the prefix that belong to it. Files next to it always do. check_claim: called
    for the prefix, and for the level above it, if a run has a claim there. The directory is removed when the process ends.
    Raises UnsafeContent for names that can't be paths.
    """
    prefix = prefix.strip("/")
    with ThreadPoolExecutor(1) as pool:
        level = pool.submit(_beside, store, prefix, beside)
        inside = _files(store.listing(f"{prefix}/" if prefix else "").objects)
        neighbours = _files(level.result())
    is_object = any(each.key == prefix for each in neighbours)
    if not inside and not is_object:
        return None
    places = {prefix, prefix.rpartition("/")[0]}
    for each in (*inside, *neighbours):
        place, _, name = each.key.rpartition("/")
        if name == CLAIM and place in places:
            check_claim(place)
    by_key = {each.key: each for each in (*neighbours, *inside) if not is_part_of_claim(each.key)}
    return stand_in_files(store, prefix, by_key.values())


def stand_in_files(store: Store, prefix: str, found: Iterable[Listed]) -> Path:
    """The local path that stands for a prefix with these objects. It is removed when the process ends."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="megaconv-")))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    register_root(root, store.uri)
    _make(store, root, found)
    return root / prefix if prefix else root


def is_part_of_claim(key: str) -> bool:
    """True for a claim, and for an object of its journal."""
    return bool({CLAIM, JOURNAL} & set(key.split("/")))


def _files(found: Iterable[Listed]) -> list[Listed]:
    """Objects without those that consoles of stores make for folders."""
    return [each for each in found if not each.key.endswith("/")]


def _beside(store: Store, prefix: str, names: Iterable[str]) -> list[Listed]:
    """Objects next to a prefix; none if the credentials don't allow to list the level above."""
    above = prefix.rpartition("/")[0]
    parent = f"{above}/" if above else ""
    if not prefix:
        return []
    try:
        level = store.listing(parent, deep=False)
    except CheckpointError as error:
        if error.code != "store-refused":
            raise
        return []
    found = list(level.objects)
    for name in names:
        if f"{parent}{name}/" in level.folders and name != prefix.rpartition("/")[2]:
            found += store.listing(f"{parent}{name}/").objects
    return found


def _make(store: Store, root: Path, found: Iterable[Listed]) -> None:
    """Create the stand-ins of objects below a directory."""
    alike: dict[tuple[str, ...], list[StandIn]] = {}
    for each in found:
        parts = _parts(store, each.key)
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            group = alike.setdefault(tuple(parts[:-2]), []) if parts[-1] in _PER_ARRAY else []
            state = RemoteState(f"{store.uri}/{each.key}", each.size, each.tag)
            group.append(StandIn(path, store, each.key, state, partial(_hold_all, group)))
        except (FileExistsError, NotADirectoryError) as error:
            raise UnsafeContent(
                f"{store.uri}/{each.key}: is an object and a folder of others; no checkpoint has such names"
            ) from error


def _hold_all(group: Sequence[StandIn]) -> None:
    """Fetch small objects of neighbouring directories at once."""
    small = [each for each in group if 0 < each.state.size <= _SMALL_OBJECT_BYTES]
    if len(small) < 2:
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda each: each.hold(0, each.state.size), small))


def _parts(store: Store, key: str) -> list[str]:
    parts = key.split("/")
    for part in parts:
        if not is_plain(part):
            raise UnsafeContent(
                f"{store.uri}: has an object {key!r:.200}, which can't be a path; remove it, or choose a deeper prefix"
            )
    return parts
