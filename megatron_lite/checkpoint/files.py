"""Writes one iteration of a `torch_dist` checkpoint through PyTorch's DCP: each rank its own blocks, rank 0 the index.

.metadata            the index: keys, global shapes, blocks, where each lies
__{rank}_0.distcp    blocks, each a torch file of its own
common.pt            what isn't sharded: args, scheduler, parameter groups
metadata.json        says what this is; written last
"""

import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_lite.checkpoint.placement import Shard

MARK = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_blocks(
    directory: Path, shards: Sequence[Shard], objects: Mapping[str, bytes], group: ProcessGroup | None
) -> None:
    """Collective over the group (None: a single process). objects: torch files by key, each on one rank alone.

    Everything is on disk when it returns. Raises DCP's CheckpointException on all ranks when one fails.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            {}, storage_writer=_Writer(directory), planner=_Planner(shards, objects), process_group=group,
            no_dist=group is None,
        )  # fmt: skip


def write_common(directory: Path, common: Mapping[str, Any]) -> None:
    """On one rank, after write_blocks."""
    content = io.BytesIO()
    torch.save(dict(common), content)
    write_file(directory / "common.pt", content.getvalue())
    write_file(directory / "metadata.json", json.dumps(MARK).encode())


def write_file(path: Path, content: bytes) -> None:
    """And bring it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class _Writer(FileSystemWriter):
    """Without the ids and paths that DCP would write into the index, so that equal states give equal files."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Planner(SavePlanner):
    """Plain tensors that know their place; no DTensor, nothing is flattened."""

    def __init__(self, shards: Sequence[Shard], objects: Mapping[str, bytes]) -> None:
        self._shards = {(shard.key, torch.Size(shard.offset)): shard for shard in shards}
        assert len(self._shards) == len(shards), "two blocks of one tensor begin at the same place"
        self._objects = objects

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Everything was handed over before."""

    def create_local_plan(self) -> SavePlan:
        tensors = [_tensor_item(shard) for shard in self._shards.values()]
        others = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(len(content)))
            for key, content in self._objects.items()
        ]
        return SavePlan(tensors + others)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=None)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if index.offset is None:
            return io.BytesIO(self._objects[index.fqn])
        return self._shards[index.fqn, index.offset].tensor.detach()


def _tensor_item(shard: Shard) -> WriteItem:
    offset, tensor = torch.Size(shard.offset), shard.tensor
    chunk = ChunkStorageMetadata(offset, tensor.size())
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, offset), WriteItemType.SHARD, tensor_data=data)


def empty_object() -> bytes:
    """The torch file of what Megatron core expects for a module without FP8 state."""
    content = io.BytesIO()
    torch.save([None], content)
    return content.getvalue()
