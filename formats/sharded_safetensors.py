"""Sharded safetensors files of torch's HuggingFaceStorageWriter(save_distributed=True), which hold chunks of tensors.

    shard-00001-model-00001-of-00001.safetensors       __metadata__ of its header gives the place of each chunk:
    {"DCP_SHARDING_INFO": "{\"model.norm.weight\": {\"saved_offsets\": [0]}, ...}"}

The first number is that of a rank, whose count nothing says. The others are the number and the count of the files to which
the model's tensors were assigned. A rank without a part of a file's tensors doesn't write this file.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py of torch 2.13.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from formats import safetensors
from formats.chunked import Chunk, ChunkedTensor, require_cover
from formats.errors import CorruptCheckpoint
from formats.regular_files import parse_json
from formats.tensor import FileTensor, Shape, as_shape

_FILES = "shard-*-model-*.safetensors"
_NAME = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_INFO = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class _Piece:
    """A chunk whose place in its file is known (formats.chunked.Stored)."""

    held: FileTensor

    def tensor(self) -> FileTensor:
        return self.held


def is_sharded(directory: Path) -> bool:
    return any(directory.glob(_FILES))


def read(directory: Path) -> dict[str, ChunkedTensor]:
    """The tensors of a directory, by name. Raises CorruptCheckpoint if chunks don't cover their tensor exactly once, as
    with a missing file."""
    pieces: dict[str, list[tuple[Shape, FileTensor]]] = {}
    _require_one_save(directory)
    for path in sorted(directory.glob(_FILES)):
        offsets = _offsets(path)
        for name, tensor in safetensors.read(path).items():
            if name not in offsets:
                raise CorruptCheckpoint(
                    f"{path}: has no offset for its part of {name}; save the checkpoint again"
                )
            pieces.setdefault(name, []).append((offsets[name], tensor))
    return {name: _join(directory, name, parts) for name, parts in pieces.items()}


def require_files(directory: Path) -> int:
    """The number of ranks whose files are there. Raises CorruptCheckpoint if no rank has one of the model's files."""
    names = _names(directory)
    held = {int(name[2]) for name in names}
    count = max((int(name[3]) for name in names), default=0)
    if len(held) < count:
        missing = next(number for number in range(1, count + 1) if number not in held)
        raise CorruptCheckpoint(
            f"{directory}: has no shard-*-model-{missing:05d}-of-{count:05d}.safetensors; copy the whole checkpoint",
            code="missing-file",
        )
    return len({int(name[1]) for name in names})


def _require_one_save(directory: Path) -> None:
    counts = {int(name[3]) for name in _names(directory)}
    if len(counts) > 1:
        listed = " and ".join(map(str, sorted(counts)))
        raise CorruptCheckpoint(
            f"{directory}: has shards of models of {listed} files; keep those of one save"
        )


def _names(directory: Path) -> list[re.Match[str]]:
    """The numbers in the names of the files: of the rank, of the model's file, and how many files the model has."""
    found = (_NAME.fullmatch(path.name) for path in directory.glob(_FILES))
    return [match for match in found if match]


def _offsets(path: Path) -> dict[str, Shape]:
    try:
        given = parse_json(safetensors.read_metadata(path)[_INFO].encode())
        found = {name: as_shape(entry["saved_offsets"]) for name, entry in given.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path}: has no valid {_INFO} ({error}); save the checkpoint again"
        ) from error
    return found


def _join(directory: Path, name: str, parts: list[tuple[Shape, FileTensor]]) -> ChunkedTensor:
    """Join the chunks of a tensor. No file gives the tensor's shape, so it is the smallest that holds all chunks."""
    dtypes, axes = set[str](), set[int]()
    for offset, tensor in parts:
        dtypes.add(tensor.dtype)
        axes |= {len(offset), len(tensor.shape)}
    if len(axes) > 1 or len(dtypes) > 1:
        raise CorruptCheckpoint(
            f"{directory}: the parts of {name} have different numbers of axes, or dtypes"
        )
    shape = (0,) * axes.pop()
    places = [(offset, tensor.shape) for offset, tensor in parts]
    for offset, sizes in places:
        ends = map(sum, zip(offset, sizes, strict=True))
        shape = tuple(map(max, shape, ends))
    require_cover(f"{directory}: {name}", shape, places)
    chunks = []
    for offset, tensor in parts:
        chunks.append(Chunk.whole(offset, tensor.shape, _Piece(tensor)))
    return ChunkedTensor(shape, dtypes.pop(), chunks)
