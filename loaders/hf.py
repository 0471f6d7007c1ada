"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.check import same_names
from megaconv.config import ModelConfig
from megaconv.errors import UsageError
from megaconv.families import Family, read_config
from megaconv.hf_config import CONFIG_NAME, load_config
from megaconv.ir import Header, OpenedSource, describe, main_dtype
from megaconv.layout import Chunk, Layout
from megaconv.options import LoadOptions
from megaconv.quantized import dequantize, quant_method
from megaconv.sidecars import find_sidecars
from megaconv.table import NativeTensor, canonical_shapes, native_tensors
from megaconv.weight_files import read_directory

DESCRIPTION = "Hugging Face transformers: config.json with *.safetensors or *.bin"

_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
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
    weights, found = read_directory(path)
    quantized = load_config(path / CONFIG_NAME) if (path / CONFIG_NAME).is_file() else config.hf or {}
    found = dequantize(found, quantized, options.dtype, weights.name)
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
    natives = _expected(family, config, whole, "hf", found)
    if quant_method(quantized, weights.name) == "mxfp4":  # as rows, where plain weights may be transposed
        natives = _expected(family, config, whole, "hf+stacked", found)
    elif any(name.endswith(_STACKED) for name in found):
        natives = max(natives, _expected(family, config, whole, "hf+stacked", found), key=partial(_fitting, found))
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


def _expected(
    family: Family, config: ModelConfig, chunk: Chunk, naming: str, found: Mapping[str, LazyTensor]
) -> list[NativeTensor]:
    natives = native_tensors(family.rows, config, naming, Layout(), 0, chunk, config.vocab)
    return [native for native in natives if not native.tied_copy or native.name in found]


def _fitting(found: Mapping[str, LazyTensor], natives: list[NativeTensor]) -> int:
    """How many are there, in their shape."""
    return sum(native.name in found and tuple(found[native.name].shape) == native.shape for native in natives)


def _without_missing_mtp(config: ModelConfig, found: Mapping[str, LazyTensor]) -> ModelConfig:
    """transformers keeps what config.json says of layers that predict further tokens, and doesn't save them."""
    first = f".layers.{config.layers}."
    most = len(found) + 1 if any(first in name for name in found) else 0
    return replace(config, mtp_layers=min(config.mtp_layers, most))


def _kind(weights: Path) -> str:
    return "safetensors" if "safetensors" in weights.name else "torch .bin"
