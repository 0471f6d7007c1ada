"""Saves that the disk has no room for: a message of the system, and no files that keep the disk full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.placement import Shard
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.store_saver import StoreSaver
from megatron_lite.checkpoint.together import SaveError


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to make a file larger."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def snapshot(iteration: int) -> Snapshot:
    values = torch.arange(100_000, dtype=torch.float32)
    return Snapshot(iteration, {}, (Shard("weight", (0,), (100_000,), values),))


def test_a_block_that_cant_be_written_names_the_systems_error_and_leaves_no_files(
    tmp_path: Path,
) -> None:
    saver = Saver(tmp_path, "torch_dist", 0, None, {})
    saver.save(snapshot(1))
    before = sorted(path.name for path in tmp_path.iterdir())
    with (
        largest_file(100_000),
        pytest.raises(SaveError, match=r"iter_0000002: rank 0 can't write it: File too large$"),
    ):
        saver.save(snapshot(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    saver.save(snapshot(2))
    assert (tmp_path / "iter_0000002" / ".metadata").is_file()


def test_only_rank_0_removes_partial_files_and_nobody_removes_those_beside_a_store(
    tmp_path: Path,
) -> None:
    partial = tmp_path / ".iter_0000002.partial"
    aside = tmp_path / ".iter_0000001.replaced"
    partial.mkdir()
    aside.mkdir()
    Saver(tmp_path, "torch_dist", 1, None, {}).remove_partial()
    stored = StoreSaver(tmp_path, "torch_dist", 0, None, {}, store=None, prefix="run")  # type: ignore[arg-type]
    stored.remove_partial()
    assert partial.is_dir()
    Saver(tmp_path, "torch_dist", 0, None, {}).remove_partial()
    assert (partial.exists(), aside.exists()) == (False, True)
