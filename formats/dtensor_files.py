"""Rank files in which torch saved DTensors: verl's FSDP checkpoints.

    model_world_size_8_rank_3.pt        a dictionary by parameter: DTensors, and plain tensors that all ranks share
    optim_world_size_8_rank_3.pt        the optimizer's state
    huggingface/config.json ...         configuration and tokenizer

Source: verl's fsdp_checkpoint_manager.py. formats/dtensor.py describes a DTensor, formats/fsdp_optimizer.py the optimizer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import torch_zip
from formats.chunked import Chunk, ChunkedTensor, require_cover
from formats.dtensor import Part, part_of, shard_of
from formats.errors import CorruptCheckpoint
from formats.tensor import FileTensor, LazyTensor, Shape, byte_count

_FILE = re.compile(r"(\w+)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")


@dataclass(frozen=True)
class SavedModel:
    """The model in the files of all ranks."""

    tensors: Mapping[str, LazyTensor]
    """Every tensor by its name, in the order of the module's state dict."""
    parameters: Sequence[str]
    """The names of DTensors. Others are buffers. If there are no DTensors, all names."""
    shards: Sequence[int]
    """Each rank's number among those that shard the model together."""

    @property
    def ranks(self) -> int:
        return len(self.shards)


def is_rank_files(path: Path) -> bool:
    return path.is_dir() and _has_files(path, "model")


def has_optimizer(path: Path) -> bool:
    return _has_files(path, "optim")


def _has_files(path: Path, kind: str) -> bool:
    return any(_FILE.fullmatch(child.name) for child in path.glob(f"{kind}_world_size_*_rank_*.pt"))


def read(path: Path) -> SavedModel:
    """The model of a checkpoint.

    Raises CorruptCheckpoint if a rank is missing or if parts don't make up a whole, and UnsupportedInput for other
    placements.
    """
    files = files_of(path, "model")
    states = [read_file(file) for file in files]
    names = states[0].keys()
    for file, state in zip(files, states, strict=True):
        if state.keys() != names:
            other = sorted(names ^ state.keys())[0]
            raise CorruptCheckpoint(
                f"{file}: {other} isn't in the files of all ranks; are they of one run?"
            )
    found: dict[str, LazyTensor] = {}
    for name in names:
        found[name] = join(name, [state[name] for state in states], files)
    sharded = [name for name, value in states[0].items() if not hasattr(value, "read_into")]
    first = next(iter(sharded), None)
    shards = [0 if first is None else shard_of(state[first]) for state in states]
    return SavedModel(found, sharded or list(found), shards)


def files_of(path: Path, kind: str) -> list[Path]:
    """The files of one kind (`model`, `optim`, `extra_state`) in the order of ranks.

    Raises CorruptCheckpoint unless there is exactly one for every rank.
    """
    found: dict[int, dict[int, Path]] = {}
    for child in path.iterdir():
        match = _FILE.fullmatch(child.name)
        if match and match[1] == kind:
            ranks = found.setdefault(int(match[2]), {})
            if ranks.setdefault(int(match[3]), child) != child:
                raise CorruptCheckpoint(
                    f"{child}: is another file of a rank that has one; keep one of them"
                )
    if len(found) != 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise CorruptCheckpoint(
            f"{path}: has {kind}_world_size_N_rank_R.pt of runs with {sizes} ranks; keep one run's"
        )
    world, files = found.popitem()
    missing = next((rank for rank in range(world) if rank not in files), None)
    if missing is not None or len(files) != world:
        file = path / f"{kind}_world_size_{world}_rank_{missing}.pt"
        raise CorruptCheckpoint(
            f"{file}: no such file; {len(files)} of {world} ranks are there",
            code="missing-file",
        )
    return [files[rank] for rank in range(world)]


def read_file(file: Path) -> Mapping[str, Any]:
    """The dictionary in the file of a rank, with DTensors as inert records."""
    value = torch_zip.read(file)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpoint(
            f"{file}: expected a dictionary by name, found {type(value).__name__}"
        )
    return value


def join(name: str, values: Sequence[Any], files: Sequence[Path]) -> LazyTensor:
    """The tensor of which the ranks hold DTensors, or copies. Raises as `read` does."""
    if hasattr(values[0], "read_into"):
        _require_alike(name, values, files)
        return values[0]  # type: ignore[no-any-return]
    whole, parts, dtypes = None, dict[Shape, Part](), set[str]()
    for value, file in zip(values, files, strict=True):
        what = f"{file}: {name}"
        shape, part = part_of(value, what)
        if whole not in (None, shape):
            raise CorruptCheckpoint(
                f"{what} is a part of {list(shape)}, for other ranks of {list(whole or ())}"
            )
        whole = shape
        dtypes.add(part.held.dtype)
        # Parts that are replicated on several ranks count once.
        place = part.offset if 0 not in part.shape else (-1, len(parts))
        replica = parts.setdefault(place, part)
        require_same_values(replica.held, part.held, what)
    if whole is None or len(dtypes) > 1:
        raise CorruptCheckpoint(
            f"{files[0].parent}: {name} is of {' and '.join(sorted(dtypes))} on different ranks"
        )
    filled = [part for part in parts.values() if 0 not in part.shape]
    require_cover(
        f"{files[0].parent}: {name}", whole, [(part.offset, part.shape) for part in filled]
    )
    return ChunkedTensor(
        whole, dtypes.pop(), [Chunk.whole(part.offset, part.shape, part) for part in filled]
    )


def require_same_values(first: LazyTensor, other: LazyTensor, what: str) -> None:
    """Raise CorruptCheckpoint if two ranks' copies of one part have different checksums. It reads no values."""
    checksums = _checksum(first), _checksum(other)
    if None not in checksums and checksums[0] != checksums[1]:
        raise CorruptCheckpoint(
            f"{what}: has other values than the copy of another rank; are the files from one run?"
        )


def _checksum(held: LazyTensor) -> int | None:
    """The CRC-32 of a tensor; None if the file doesn't have it for exactly the bytes of this tensor."""
    if not isinstance(held, FileTensor) or held.check is None:
        return None
    entry = held.check.entry
    return entry.crc if entry.size == byte_count(held.shape, held.dtype) else None


def _require_alike(name: str, values: Sequence[Any], files: Sequence[Path]) -> None:
    """Raise CorruptCheckpoint unless all ranks hold this tensor whole, with the same shape, dtype and values."""
    first = (values[0].shape, values[0].dtype)
    for value, file in zip(values, files, strict=True):
        if not hasattr(value, "read_into") or (value.shape, value.dtype) != first:
            raise CorruptCheckpoint(
                f"{file}: {name} differs from {files[0].name}; are the files from one run?"
            )
        require_same_values(values[0], value, f"{file}: {name}")
