"""The register of stand-ins: local sparse files that stand for remote objects.

A stand-in has the size of its object, and holes where nothing was fetched. Code that opens a file of a checkpoint asks
this register first, so that it never reads a hole as zeros:

    InputFile                      reads tensors and headers through the stand-in; nothing of them stays on disk
    open_regular, memory maps      first have the stand-in fetch the bytes, which then stay in the sparse file

`formats/stores/` makes the stand-ins. This module imports nothing, so that every reader of files may import it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_THREADS = 16
Span = tuple[int, int]
"""The first byte of a range, and the byte after its last one."""


class RemoteState(NamedTuple):
    """The state of an object. It changes when the object is replaced."""

    uri: str
    size: int
    tag: str
    """The store's tag of this content: the ETag."""


class Origin(Protocol):
    """The place that the objects of some stand-ins come from."""

    def require_unchanged(self, states: Sequence[RemoteState]) -> None:
        """Raise CorruptCheckpoint if one of the objects was replaced or deleted."""
        ...


class PartialFile(Protocol):
    """A stand-in. Any thread may use it. Every method raises CheckpointError if the bytes can't be fetched."""

    @property
    def state(self) -> RemoteState: ...

    @property
    def origin(self) -> Origin: ...

    def read_into(self, offset: int, out: memoryview, tensor: Span | None) -> None:
        """Fill a buffer with bytes of a tensor. tensor: the range of the whole tensor, which is likely to be read."""
        ...

    def announce(self, tensor: Span) -> None:
        """Fetch the range of a tensor ahead, as far as memory allows: somebody will read all of it soon."""
        ...

    def abandon(self) -> None:
        """Give up what is fetched ahead: the run that announced it has ended."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """A small range that is not part of a tensor: of a header, a directory, a pickle."""
        ...

    def expect(self, spans: Sequence[Span]) -> None:
        """Fetch small ranges that will be read, with few requests, at the same time."""
        ...

    def require(self, start: int, end: int) -> None:
        """Put the bytes of a range into the local file, where they stay."""
        ...


_files: dict[str, PartialFile] = {}
"""Path -> stand-in, until the process ends: tensors may be read as long as somebody holds them."""
_roots: dict[str, str] = {}
"""Directory of stand-ins -> the URI that it stands for, both without a final slash."""


def register(path: Path, file: PartialFile) -> None:
    """Make a stand-in known under its path."""
    _files[os.fspath(path)] = file


def register_root(root: Path, uri: str) -> None:
    """Make a directory of stand-ins known. Messages show the URI instead of the directory."""
    _roots[os.fspath(root)] = uri


def find(path: str | Path) -> PartialFile | None:
    """The stand-in at a path; None for a complete file."""
    text = os.fspath(path)
    found = _files.get(text)
    if found is None and any(text.startswith(root) for root in _roots):
        return _files.get(os.path.abspath(text))  # noqa: PTH100 (resolves no links; there are none)
    return found


def exist() -> bool:
    """True if any file is a stand-in."""
    return bool(_files)


def fetch_whole(paths: Iterable[Path]) -> None:
    """Put the bytes of files into their local files. For libraries that open paths themselves."""
    files = [file for path in paths if (file := find(path)) is not None]
    if len(files) < 2:
        for file in files:
            file.require(0, file.state.size)
        return
    # Every command imports this module, and few of them read from a store.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda file: file.require(0, file.state.size), files))


def displayed(text: str) -> str:
    """A text with URIs in the places of directories of stand-ins."""
    for root, uri in _roots.items():
        if root in text:
            text = text.replace(root, uri)
    return text


def local(text: str) -> str:
    """The path of the stand-in that `displayed` shows as this URI; any other text unchanged."""
    for root, uri in _roots.items():
        # Several inputs in one bucket have a directory each.
        if text.startswith(f"{uri}/") and root + text[len(uri) :] in _files:
            return root + text[len(uri) :]
    return text
