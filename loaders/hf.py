"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.check import same_names
from megaconv.config import ModelConfig
from megaconv.errors import UsageError
from megaconv.families import read_config
from megaconv.hf_config import CONFIG_NAME
from megaconv.ir import Header, OpenedSource, describe, main_dtype
from megaconv.layout import Chunk, Layout
from megaconv.options import LoadOptions
from megaconv.sidecars import find_sidecars
from megaconv.table import canonical_shapes, native_tensors
from megaconv.weight_files import read_file, read_sharded

DESCRIPTION = "Hugging Face transformers: config.json with *.safetensors or *.bin"

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""

_STACKED = r"\.experts\.(gate_up_proj|down_proj)$"
"""All experts of a layer in one tensor, as transformers 5 holds them."""


def detect(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file()


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a directory that isn't a complete model of a known family."""
    directory = options.config or path
    family, config = read_config(directory / CONFIG_NAME)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    weights, found = _read_weights(path)
    if family.prefix and not any(name.startswith(family.prefix) for name in found):
        found = {
            name if name.startswith("lm_head.") else family.prefix + name: tensor for name, tensor in found.items()
        }
    found = {
        name: tensor
        for name, tensor in found.items()
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    }
    config = _without_missing_mtp(config, found)
    layers = min(config.layers, len(found) + 1)  # of more layers some have to be missing
    whole = Chunk(0, 0, 0, layers, is_first=True, is_last=True)
    naming = "hf+stacked" if any(re.search(_STACKED, name) for name in found) else "hf"
    natives = [
        native
        for native in native_tensors(family.rows, config, naming, Layout(), 0, whole, config.vocab)
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


def _without_missing_mtp(config: ModelConfig, found: Mapping[str, LazyTensor]) -> ModelConfig:
    """transformers keeps what config.json says of layers that predict further tokens, and doesn't save them."""
    first = f".layers.{config.layers}."
    return config if any(first in name for name in found) else replace(config, mtp_layers=0)


def _kind(weights: Path) -> str:
    return "safetensors" if "safetensors" in weights.name else "torch .bin"


def _read_weights(path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The file that was decisive, and every tensor by its name."""
    for name in _WEIGHTS:
        weights = path / name
        if not weights.is_file():
            continue
        if name.endswith(".index.json"):
            return weights, read_sharded(weights)
        return weights, read_file(weights)
    raise CorruptCheckpoint(f"{path}: has a {CONFIG_NAME} but no weights; expected one of {', '.join(_WEIGHTS)}")
