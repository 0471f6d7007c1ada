"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

from dataclasses import replace
from pathlib import Path

from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.errors import UsageError
from megaconv.families import read_config
from megaconv.hf_config import CONFIG_NAME
from megaconv.ir import Header, OpenedSource, describe, main_dtype
from megaconv.options import LoadOptions
from megaconv.sidecars import find_sidecars
from megaconv.weight_files import read_file, read_sharded, whole_model

DESCRIPTION = "Hugging Face transformers: config.json with *.safetensors or *.bin"

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""


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
    tensors = whole_model(family, config, "hf", found, weights.name)
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
            return weights, read_sharded(weights)
        return weights, read_file(weights)
    raise CorruptCheckpoint(f"{path}: has a {CONFIG_NAME} but no weights; expected one of {', '.join(_WEIGHTS)}")
