"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from formats import safetensors, torch_zip
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.check import same_names
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import family_of_hf
from megaconv.hf_config import CONFIG_NAME, load_config
from megaconv.ir import Header, OpenedSource, describe, main_dtype
from megaconv.layout import Chunk, Layout
from megaconv.options import LoadOptions
from megaconv.sidecars import find_sidecars
from megaconv.table import canonical_shapes, native_tensors

DESCRIPTION = "Hugging Face transformers: config.json with *.safetensors or *.bin"

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""


def detect(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file()


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a directory that isn't a complete model of a known family."""
    directory = options.config or path
    raw = load_config(directory / CONFIG_NAME)
    if options.true_vocab_size not in (None, raw.get("vocab_size")):
        raise UsageError(
            f"{path}: its vocabulary of {raw.get('vocab_size')} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    family = family_of_hf(raw, str(directory / CONFIG_NAME))
    config = family.read_hf(raw)
    weights, found = _read_weights(path)
    found = {
        name: tensor
        for name, tensor in found.items()
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    }
    whole = Chunk(0, 0, 0, config.layers, is_first=True, is_last=True)
    natives = [
        native
        for native in native_tensors(family.rows, config, "hf", Layout(), 0, whole, config.vocab)
        if not native.tied_copy or native.name in found
    ]
    same_names([native.name for native in natives], found, weights.name)
    placed = [Placed(native, found[native.name], weights.name) for native in natives]
    tensors = assemble(canonical_shapes(family.rows, config), placed, strict=True)
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source=f"hf, {_kind(weights)}",
    )
    return OpenedSource(header, tensors)


def _kind(weights: Path) -> str:
    return "safetensors" if "safetensors" in weights.name else "torch .bin"


def _read_weights(path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The file that was decisive, and every tensor by its name."""
    for name in _WEIGHTS:
        weights = path / name
        if not weights.is_file():
            continue
        if name.endswith(".index.json"):
            return weights, _read_sharded(weights)
        return weights, _read_file(weights)
    raise CorruptCheckpoint(f"{path}: has a {CONFIG_NAME} but no weights; expected one of {', '.join(_WEIGHTS)}")


def _read_file(path: Path) -> dict[str, LazyTensor]:
    if path.suffix == ".safetensors":
        return dict(safetensors.read(path))
    value = torch_zip.read(path)
    if not isinstance(value, Mapping):
        raise CorruptCheckpoint(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    for name, tensor in value.items():
        if not hasattr(tensor, "read_into"):
            raise CorruptCheckpoint(f"{path}: {name!r} is not a tensor")
    return dict(value)


def _read_sharded(index: Path) -> dict[str, LazyTensor]:
    files = safetensors.read_index(index)
    shards = {name: _read_file(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise TensorMismatch(f"{index}: says that {file} holds {name}, which it doesn't")
    for file, tensors in shards.items():
        for name in tensors:
            if files.get(name) != file:
                raise TensorMismatch(f"{index.parent / file}: holds {name}, which {index.name} doesn't place there")
    return {name: shards[file][name] for name, file in files.items()}
