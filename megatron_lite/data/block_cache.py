"""A cache of blocks of remote objects: one file of a bounded size on a local disk, which all processes of a machine share.

    blocks.cache
        0        header: magic, number of places
       64        entries, one for each place: object, block, length, digest of the block
    aligned      places of 1 MiB

A block may lie in 64 of the places. If all are taken, it replaces a random one: samples are read in random order, so the
least recently used block is as likely to be needed as any other. Nobody waits to read. The digest is one of the object, the
block's number and the content. A place whose content doesn't have it, because of a kill or of two writers, counts as empty.
"""

import contextlib
import fcntl
import logging
import os
import random
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import blake3

from formats.errors import CheckpointError
from formats.file_limit import is_limit, limit_reached
from formats.full_writes import write_at
from megaconv.errors import UsageError

BLOCK_BYTES = 1 << 20
WAYS = 64
_MAGIC = b"megatron-lite blocks 2\n"
_HEADER = struct.Struct("<32sQ")
_ENTRY = struct.Struct("<16sQQ16s")
_ENTRIES_AT = 64
_PAGE = 4096
_STRIPES = 64
_opening = Lock()
_log = logging.getLogger("megatron_lite")


class Block(NamedTuple):
    """A block of an object."""

    object: bytes
    """16 bytes that identify the object and its content."""
    number: int

    @property
    def key(self) -> bytes:
        """24 bytes that only this block has."""
        return self.object + self.number.to_bytes(8, "little")

    @property
    def place(self) -> int:
        """A number that is spread evenly over blocks, and is the same in all processes."""
        digest = blake3.blake3(self.key).digest(length=8)
        return int.from_bytes(digest, "little")


class HotBlocks:
    """The blocks that a process has used last, in memory. All datasets of a run share them. Any thread may use them."""

    def __init__(self, count: int) -> None:
        """count: the most blocks that are held."""
        self._count = count
        self._blocks: OrderedDict[Block, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, block: Block) -> bytes | None:
        """The content of a block; None if it isn't held."""
        with self._lock:
            content = self._blocks.get(block)
            if content is not None:
                self._blocks.move_to_end(block)
            return content

    def keep(self, block: Block, content: bytes) -> None:
        """Hold a block, in the place of the one that was used longest ago."""
        with self._lock:
            self._blocks[block] = content
            while len(self._blocks) > self._count:
                self._blocks.popitem(last=False)


class BlockCache:
    """The cache of a directory. Any thread and any process may use it."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        """nbytes: size of the file. A file of another size is replaced; processes that have it open keep it.

        Raises UsageError for less than one block, CheckpointError if the file can't be made.
        """
        self._places = nbytes // (BLOCK_BYTES + _ENTRY.size)
        if self._places < 1:
            raise UsageError(
                f"--data-cache-size {nbytes}: is less than a block of {BLOCK_BYTES:,} bytes; give more"
            )
        self._ways = min(WAYS, self._places)
        self._sets = self._places // self._ways
        entries_end = _ENTRIES_AT + self._places * _ENTRY.size
        self._blocks_at = -(-entries_end // _PAGE) * _PAGE
        self._stripes = [Lock() for _ in range(_STRIPES)]
        self._is_full = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(directory / "blocks.lock", os.O_RDWR | os.O_CREAT, 0o666)
            # The system's locks hold between processes, and not between threads of one process.
            with _opening, self._locked(0):
                self._file = self._opened(directory / "blocks.cache")
        except OSError as error:
            if is_limit(error):
                raise limit_reached(directory) from error
            raise CheckpointError(
                f"{directory}: can't be written: {error.strerror}; give a --data-cache-path where there is space and permission"
            ) from error

    def _opened(self, path: Path) -> int:
        header = _HEADER.pack(_MAGIC, self._places)
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDWR)
            if os.pread(file, len(header), 0) == header:
                return file
            os.close(file)
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        file = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        write_at(file, memoryview(header), 0)
        staged.replace(path)
        return file

    def read(self, block: Block) -> bytes | None:
        """The content of a block; None if it isn't there."""
        first, entries = self._entries(block)
        for way, (owner, number, length, digest) in enumerate(entries):
            if (owner, number) != block or not 0 < length <= BLOCK_BYTES:
                continue
            content = os.pread(self._file, length, self._offset(first + way))
            if _digest(block, content) == digest:
                return content
        return None

    def write(self, block: Block, content: bytes) -> None:
        """Keep the content of a block. A disk that can't take it makes the cache stop growing."""
        if self._is_full:
            return
        first, entries = self._entries(block)
        way = _chosen(block, entries)
        place = first + way
        entry = _ENTRY.pack(*block, len(content), _digest(block, content))
        entry_at = _ENTRIES_AT + place * _ENTRY.size
        try:
            write_at(self._file, memoryview(bytes(_ENTRY.size)), entry_at)
            write_at(self._file, memoryview(content), self._offset(place))
            write_at(self._file, memoryview(entry), entry_at)
        except OSError as error:
            self._is_full = True
            _log.warning(
                "--data-cache-path: can't be written (%s); the run goes on, and keeps no more blocks",
                error.strerror,
            )

    def _entries(self, block: Block) -> tuple[int, list[tuple[bytes, int, int, bytes]]]:
        """(first place of a block's set, the entries of the set)."""
        first = block.place % self._sets * self._ways
        size = self._ways * _ENTRY.size
        table = os.pread(self._file, size, _ENTRIES_AT + first * _ENTRY.size)
        return first, list(_ENTRY.iter_unpack(table.ljust(size, b"\0")))

    def _offset(self, place: int) -> int:
        return self._blocks_at + place * BLOCK_BYTES

    @contextlib.contextmanager
    def fetching(self, block: Block) -> Iterator[None]:
        """Hold the right to fetch a block: other threads and processes that miss it wait, and then find it."""
        stripe = block.place % _STRIPES
        with self._stripes[stripe], self._locked(stripe):
            yield

    @contextlib.contextmanager
    def _locked(self, stripe: int) -> Iterator[None]:
        """Hold a lock among processes. On a file system without locks, several may fetch the same block."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX, 1, stripe)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN, 1, stripe)


def _chosen(block: Block, entries: list[tuple[bytes, int, int, bytes]]) -> int:
    """The place in its set for a block: its own, an empty one, or a random one."""
    empty = None
    for way, (owner, number, length, _) in enumerate(entries):
        if (owner, number) == block:
            return way
        if not length and empty is None:
            empty = way
    return random.randrange(len(entries)) if empty is None else empty


def _digest(block: Block, content: bytes) -> bytes:
    """16 bytes for a block with its content: an entry that two writers have mixed fits neither block."""
    return blake3.blake3(block.key).update(content).digest(length=16)
