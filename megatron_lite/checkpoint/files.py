"""Writes one iteration of a `torch_dist` checkpoint through PyTorch's DCP. Each rank writes its own blocks, rank 0 the index.

.metadata            the index: keys, global shapes, blocks, and the place of each block
__{rank}_0.distcp    blocks, each a complete torch file, and the mark of this save (formats/save_marks.py)
common.pt            the values that are not sharded: args, scheduler, parameter groups
metadata.json        names the format; written last
"""

import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from formats import save_marks
from megatron_lite.checkpoint.placement import Shard
from megatron_lite.checkpoint.tensor_file import TensorFile
from megatron_lite.checkpoint.together import of_all

MARK = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DIRECTORY_BYTES = 1024
"""As many bytes at the end of a block hold the directory of its archive, with the checksums of its data."""


def write_blocks(
    directory: Path,
    shards: Sequence[Shard],
    objects: Mapping[str, bytes],
    group: ProcessGroup | None,
) -> str:
    """Write the shards and objects of all ranks to `directory`. All data is on disk when the function returns.

    Collective over the group (None: a single process). objects: torch files by key; each key is on one rank only.
    Returns the id of this save. When one rank fails, all raise DCP's CheckpointException, or an error of of_all.
    """
    writer = _Writer(directory)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            {}, storage_writer=writer, planner=_Planner(shards, objects), process_group=group,
            no_dist=group is None,
        )  # fmt: skip
    checksums = of_all(lambda: _checksums(directory, writer.written), group)
    save_id = sha256("".join(checksums).encode()).hexdigest()
    of_all(lambda: _append_marks(directory, writer.written, save_id), group)
    return save_id


def _append_marks(directory: Path, written: Sequence[WriteResult], save_id: str) -> None:
    for name in _files_of(written):
        save_marks.append(directory / name, save_id)


def _checksums(directory: Path, written: Sequence[WriteResult]) -> str:
    """Return a hash of the checksums that torch has put into this rank's blocks. The data is not read again."""
    found = sha256()
    places = [result.storage_data for result in written]
    for name in _files_of(written):
        with (directory / name).open("rb") as file:
            for place in places:
                if place.relative_path == name:
                    count = min(place.length, _DIRECTORY_BYTES)
                    file.seek(place.offset + place.length - count)
                    found.update(file.read(count))
    return found.hexdigest()


def _files_of(written: Sequence[WriteResult]) -> list[str]:
    return sorted({result.storage_data.relative_path for result in written})


def write_common(directory: Path, common: Mapping[str, Any], save_id: str) -> None:
    """Write common.pt and metadata.json. Call it on one rank, after write_blocks, with the id that it returned."""
    content = io.BytesIO()
    torch.save({**common, save_marks.KEY: save_id}, content)
    write_file(directory / "common.pt", content.getvalue())
    write_file(directory / "metadata.json", json.dumps(MARK).encode())


def write_file(path: Path, content: bytes | TensorFile) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        for block in (content,) if isinstance(content, bytes) else content.blocks():
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


class _Writer(FileSystemWriter):
    """DCP's writer without the ids and paths that it adds to the index: equal states give equal files."""

    written: Sequence[WriteResult] = ()
    """The places of this rank's blocks, once they are written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            done = super().write_data(plan, planner)
        except RuntimeError as error:
            raise _system_error(error) or error from None
        self.written = done.wait()
        return done

    def storage_meta(self) -> StorageMeta | None:
        return None


def _system_error(error: BaseException) -> OSError | None:
    """Return the system's error, such as a full disk, that torch's zip writer hides behind an error of its own; None without one."""
    found = error.__context__
    while found is not None:
        if isinstance(found, OSError):
            return OSError(found.errno, found.strerror)
        found = found.__context__
    return None


class _Planner(SavePlanner):
    """Plans plain tensors with known offsets. There are no DTensors, and nothing is flattened."""

    def __init__(self, shards: Sequence[Shard], objects: Mapping[str, bytes]) -> None:
        self._shards = {(shard.key, torch.Size(shard.offset)): shard for shard in shards}
        assert len(self._shards) == len(shards), "two blocks of one tensor begin at the same place"
        self._objects = objects

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: __init__ received all shards and objects."""

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's blocks and objects."""
        tensors = [_tensor_item(shard) for shard in self._shards.values()]
        others = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            for key, content in self._objects.items()
        ]
        return SavePlan(tensors + others)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Combine the ranks' plans into the index."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=None)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one planned item."""
        index = write_item.index
        if index.offset is None:
            return io.BytesIO(self._objects[index.fqn])
        return self._shards[index.fqn, index.offset].tensor.detach()


def _tensor_item(shard: Shard) -> WriteItem:
    offset, tensor = torch.Size(shard.offset), shard.tensor
    chunk = ChunkStorageMetadata(offset, tensor.size())
    data = TensorWriteData(
        chunk, TensorProperties(dtype=tensor.dtype), torch.Size(shard.global_shape)
    )
    return WriteItem(MetadataIndex(shard.key, offset), WriteItemType.SHARD, tensor_data=data)


def empty_object() -> bytes:
    """Return the torch file that Megatron core expects for a module without FP8 state."""
    content = io.BytesIO()
    torch.save([None], content)
    return content.getvalue()
