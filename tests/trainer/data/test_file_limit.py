"""A process with too many open files says so. No file is called damaged or changed for it."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from formats.errors import CheckpointError, CorruptCheckpoint
from formats.file_limit import raise_file_limit
from formats.opened import OpenedFiles
from formats.regular_files import read_small
from megatron_lite.data.block_cache import BLOCK_BYTES, BlockCache
from megatron_lite.data.index_cache import cached
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.objectives import reference_cache
from tests.trainer.data.corpus import write_documents


@pytest.fixture
def at_limit() -> Iterator[Callable[[], None]]:
    """A function after which this process can't open any further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_descriptor = os.dup(0)
    os.close(next_descriptor)

    def reach() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, hard))

    yield reach
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def read_index(place: Path) -> None:
    cached(place, "key", ["a"], lambda: [np.arange(3)])


def read_references(place: Path) -> None:
    pairs = np.arange(1)
    reference_cache.read(place / "references.npz", {}, pairs)


READERS: dict[str, Callable[[Path], object]] = {
    "a small file": lambda place: read_small(place / "x.idx", 1 << 20),
    "a dataset": lambda place: IndexedDataset(place / "x"),
    "a built index": read_index,
    "log-probabilities": read_references,
    "blocks of a store": lambda place: BlockCache(place / "blocks", 2 * BLOCK_BYTES),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_says_that_too_many_files_are_open(
    name: str, tmp_path: Path, at_limit: Callable[[], None]
) -> None:
    write_documents(tmp_path / "x", [[[1, 2, 3]]])
    read_index(tmp_path)
    (tmp_path / "references.npz").write_bytes(b"anything")
    at_limit()
    with pytest.raises(
        CheckpointError, match=r"too many open files, .* raise the limit"
    ) as refused:
        READERS[name](tmp_path)
    assert refused.value.code == "too-many-files"


def test_a_source_that_cannot_be_opened_again_is_not_said_to_have_changed(
    tmp_path: Path, at_limit: Callable[[], None]
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with OpenedFiles() as opened:
        read_small(tmp_path / "x", 1)
    at_limit()
    with pytest.raises(
        CheckpointError, match=f"{tmp_path / 'x'}: .*too many open files"
    ) as refused:
        opened.require_unchanged()
    assert not isinstance(refused.value, CorruptCheckpoint)


def test_the_limit_is_raised_as_far_as_it_may_be(at_limit: Callable[[], None]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    at_limit()
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_dataset_that_nobody_may_read_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "x", [[[1, 2, 3]]])

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorruptCheckpoint, match=r"x\.idx: can't be read: Permission denied"):
        IndexedDataset(tmp_path / "x")
