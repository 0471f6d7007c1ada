"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from formats.tensor import LazyTensor
from megaconv.engine.quantized import dequantize
from megaconv.engine.sidecars import find_sidecars
from megaconv.engine.weight_files import has_weights, read_directory, whole_model
from megaconv.errors import UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.hf_config import load_config, quant_method, with_modelopt_file
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import inner_names
from megaconv.families.parts.whole_model import split_whole
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF, HF_STACKED
from megaconv.options import LoadOptions

DESCRIPTION = "Hugging Face transformers: config.json with *.safetensors or *.bin"
HAS_TEXT_ONLY = True


def detect(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() and has_weights(path)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a directory that isn't a complete model of a known family."""
    directory = options.config or path
    family, config = read_config(directory / CONFIG_NAME, text_only=options.text_only, whole=True)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    weights, found = read_directory(path)
    beside_weights = path if (path / CONFIG_NAME).is_file() else directory
    quantized = with_modelopt_file(load_config(beside_weights / CONFIG_NAME), path)
    found = dequantize(found, quantized, options.dtype, weights.name)
    left_out, carried = dict[str, int](), dict[str, LazyTensor]()
    if options.text_only:
        found, config, left_out = _language_model(found, config, family)
    elif config.whole is not None:
        found, carried, config = split_whole(found, config, family.rows, weights.name)
        config = _tied_without_head(config, found)
    if family.prefix and not any(name.startswith(family.prefix) for name in found):
        found = {
            name if name.startswith("lm_head.") else family.prefix + name: tensor for name, tensor in found.items()
        }
    for old, new in family.older.items():
        found = {name.removesuffix(old) + new if name.endswith(old) else name: t for name, t in found.items()}
    # MXFP4 has experts as rows, where plain weights may be transposed.
    naming = HF_STACKED if quant_method(quantized, weights.name) == "mxfp4" else HF
    config, tensors = whole_model(family, config, naming, found | carried, weights.name)
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source=f"hf, {_kind(weights)}",
        beside=left_out,
    )
    return OpenedSource(header, tensors)


def _language_model(
    found: Mapping[str, LazyTensor], config: ModelConfig, family: Family
) -> tuple[dict[str, LazyTensor], ModelConfig, dict[str, int]]:
    """Its tensors by the names of a model by itself; its configuration, tied where the files hold no head; what lies beside it."""
    names = inner_names(found, family.rows)
    others = (name.split(".") for name in found if name not in names)
    beside = Counter(".".join(words[: 2 if words[0] == "model" else 1]) for words in others)
    kept = {new: found[old] for old, new in names.items()}
    return kept, _tied_without_head(config, kept), dict(beside)


def _tied_without_head(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    return config if "lm_head.weight" in names else changed(config, {"tie_embeddings": True})


def _kind(weights: Path) -> str:
    return "safetensors" if "safetensors" in weights.name else "torch .bin"
