"""Indexed datasets in an object store: `--data-path s3://bucket/corpus_text_document`.

    PREFIX.idx      fetched once into --data-cache-path, where all processes of a machine map it
    PREFIX.bin      read in blocks of 1 MiB, which a cache of bounded size keeps there (block_cache.py)

Both belong to one state of the object: its ETag is in the names of the cache and in every request.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import blake3

from formats.errors import CheckpointError, CorruptCheckpoint
from formats.file_limit import is_limit, limit_reached
from formats.full_writes import write_at
from formats.partial_files import RemoteState
from formats.stores.addresses import Address, is_store
from formats.stores.stand_in import fetch
from formats.stores.writing import WritableStore
from megaconv.errors import UsageError
from megaconv.local_paths import local_word
from megaconv.store_inputs import parsed, writable_store
from megatron_lite.data.block_cache import BLOCK_BYTES, Block, BlockCache, HotBlocks
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.named_corpora import read_names, with_prefixes
from megatron_lite.settings.learning import Data

FETCHED_AT_ONCE = 16
_INDEX_PIECE_BYTES = 8 << 20
_HOT_BLOCKS = 64
"""Blocks of all datasets that a process holds in memory: the next sequence is often in the block of the last one."""


@dataclass(frozen=True)
class DataCache:
    """The local place for data of a store."""

    directory: Path | None
    """The directory of --data-cache-path."""
    nbytes: int
    """Size of the file with blocks."""
    _stores: dict[Address, WritableStore] = field(default_factory=dict)
    _opened: dict[str, IndexedDataset] = field(default_factory=dict)
    """Datasets by URI: the splits of a corpus share one."""
    _hot: HotBlocks = field(default_factory=lambda: HotBlocks(_HOT_BLOCKS))

    def dataset(self, prefix: str) -> IndexedDataset:
        """The dataset of a prefix, which is a path or the URI of a store.

        Raises CorruptCheckpoint for missing or inconsistent files, UsageError for a URI without a cache.
        """
        if not is_store(prefix):
            return IndexedDataset(local_word(prefix))
        if self.directory is None:
            raise UsageError(
                f"{prefix}: data of a store needs a local cache; give --data-cache-path DIR"
            )
        if prefix not in self._opened:
            store, key = self._store(prefix), parsed(prefix).prefix
            index, tokens = (_Object(store, f"{key}{suffix}") for suffix in (".idx", ".bin"))
            path = _local_index(index, self.directory)
            blocks = _Tokens(tokens, self._blocks, self._hot)
            self._opened[prefix] = IndexedDataset(prefix, path, blocks)
        return self._opened[prefix]

    def _store(self, prefix: str) -> WritableStore:
        """The bucket of a URI. A client takes a third of a second to make."""
        bucket = parsed(prefix)._replace(prefix="")
        if bucket not in self._stores:
            self._stores[bucket] = writable_store(prefix)
        return self._stores[bucket]

    @cached_property
    def _blocks(self) -> BlockCache:
        assert self.directory is not None
        return BlockCache(self.directory, self.nbytes)


def reads_store(data: Data) -> bool:
    """True if a data flag, or a name of --corpora in it, means the URI of a store."""
    names = read_names(data.corpora)
    for words in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        if any(is_store(word) for word in with_prefixes(words or (), names, "--data-path")):
            return True
    return False


class _Object:
    """An object of a dataset in the state in which it was found."""

    def __init__(self, store: WritableStore, key: str) -> None:
        self._store, self._key = store, key
        uri = f"{store.uri}/{key}"
        found = store.head(key)
        if found is None:
            raise CorruptCheckpoint(
                f"{uri}: no such object; a dataset is given by its URI without .bin or .idx"
            )
        self.state = RemoteState(uri, found.size, found.tag)
        self.identity = blake3.blake3(f"{uri} {found.tag}".encode()).digest(length=16)

    def read(self, start: int, end: int) -> bytes:
        content = bytearray(end - start)
        fetch(self._store, self._key, self.state, start, memoryview(content))
        return bytes(content)


class _Tokens:
    """The .bin of a dataset (megatron_lite.data.indexed.TokenFile)."""

    def __init__(self, source: _Object, cache: BlockCache, hot: HotBlocks) -> None:
        self._source, self._cache, self._hot = source, cache, hot

    def __len__(self) -> int:
        return self._source.state.size

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes from `start` on, which lie inside the file."""
        end, pieces = start + nbytes, []
        for number in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            begin = number * BLOCK_BYTES
            pieces.append(self._block(number)[max(0, start - begin) : end - begin])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block(self, number: int) -> bytes:
        block = Block(self._source.identity, number)
        content = self._hot.get(block)
        if content is None:
            content = self._cached(block)
            self._hot.keep(block, content)
        return content

    def _cached(self, block: Block) -> bytes:
        """A block from the disk, or else from the store."""
        content = self._cache.read(block)
        if content is not None:
            return content
        with self._cache.fetching(block):
            content = self._cache.read(block)
            if content is None:
                start = block.number * BLOCK_BYTES
                content = self._source.read(start, min(start + BLOCK_BYTES, len(self)))
                self._cache.write(block, content)
            return content


def _local_index(index: _Object, directory: Path) -> Path:
    """The local copy of an .idx, which appears complete. One process of a machine fetches it, the others wait."""
    path = directory / f"{index.identity.hex()}.idx"
    try:
        if not path.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                if not path.is_file():
                    _fetch_whole(index, path)
    except OSError as error:
        if is_limit(error):
            raise limit_reached(path) from error
        raise CheckpointError(
            f"{path}: can't be written: {error.strerror}; give a --data-cache-path where there is space and permission"
        ) from error
    return path


def _fetch_whole(source: _Object, path: Path) -> None:
    staged, size = path.with_name(f".{path.name}.{os.getpid()}"), source.state.size
    try:
        with staged.open("wb") as file, ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
            file.truncate(size)
            starts = range(0, size, _INDEX_PIECE_BYTES)
            list(pool.map(partial(_copy, source, file.fileno()), starts))
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _copy(source: _Object, file: int, start: int) -> None:
    content = source.read(start, min(start + _INDEX_PIECE_BYTES, source.state.size))
    write_at(file, memoryview(content), start)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
