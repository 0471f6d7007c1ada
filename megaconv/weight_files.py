"""Named tensors of whole models: in safetensors or torch files, alone or with an index; and the model that they are."""

import re
from collections.abc import Mapping
from pathlib import Path

from formats import safetensors, torch_zip
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.check import same_names
from megaconv.config import ModelConfig
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.ir import Key
from megaconv.layout import Chunk, Layout
from megaconv.table import canonical_shapes, native_tensors


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of what torch saved under any other name."""
    if path.suffix == ".safetensors":
        return dict(safetensors.read(path))
    value = torch_zip.read(path)
    if not isinstance(value, Mapping):
        raise CorruptCheckpoint(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(name, str) or not hasattr(tensor, "read_into"):
            raise CorruptCheckpoint(f"{path}: {name!r} is not a tensor")
    return dict(value)


def read_sharded(index: Path) -> dict[str, LazyTensor]:
    """All tensors of a model in several files, in the order of its index. Raises TensorMismatch where the two disagree."""
    files = safetensors.read_index(index)
    shards = {name: read_file(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise TensorMismatch(f"{index}: says that {file} holds {name}, which it doesn't")
    for file, tensors in shards.items():
        for name in tensors:
            if files.get(name) != file:
                raise TensorMismatch(f"{index.parent / file}: holds {name}, which {index.name} doesn't place there")
    return {name: shards[file][name] for name, file in files.items()}


def whole_model(
    family: Family, config: ModelConfig, naming: str, found: Mapping[str, LazyTensor], where: str
) -> dict[Key, LazyTensor]:
    """The canonical tensors of a model that isn't cut. where: names it in messages.

    Raises TensorMismatch for tensors that are missing, unknown or misshapen.
    """
    kept = {
        name: tensor
        for name, tensor in found.items()
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    }
    layers = min(config.layers, len(kept) + 1)  # of more layers some have to be missing
    whole = Chunk(0, 0, 0, layers, is_first=True, is_last=True)
    natives = [
        native
        for native in native_tensors(family.rows, config, naming, Layout(), 0, whole, config.vocab)
        if not native.tied_copy or native.name in kept
    ]
    same_names([native.name for native in natives], kept, where)
    placed = [Placed(native, kept[native.name], where) for native in natives]
    return assemble(canonical_shapes(family.rows, config), placed, strict=True)
