"""Sharded safetensors files of torch's HuggingFaceStorageWriter(save_distributed=True), which hold chunks of tensors.

    shard-00001-model-00001-of-00001.safetensors       __metadata__ of its header gives the place of each chunk:
    {"DCP_SHARDING_INFO": "{\"model.norm.weight\": {\"saved_offsets\": [0]}, ...}"}

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py of torch 2.13.
"""

from dataclasses import dataclass
from pathlib import Path

from formats import safetensors
from formats.chunked import Chunk, ChunkedTensor, require_cover
from formats.errors import CorruptCheckpoint
from formats.regular_files import parse_json
from formats.tensor import FileTensor, Shape, as_shape

_FILES = "shard-*-model-*.safetensors"
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
    for path in sorted(directory.glob(_FILES)):
        offsets = _offsets(path)
        for name, tensor in safetensors.read(path).items():
            if name not in offsets:
                raise CorruptCheckpoint(
                    f"{path}: has no offset for its part of {name}; save the checkpoint again"
                )
            pieces.setdefault(name, []).append((offsets[name], tensor))
    return {name: _join(directory, name, parts) for name, parts in pieces.items()}


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
