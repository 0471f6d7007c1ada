"""Hugging Face directories: config.json, and weights in safetensors or torch `.bin` files, single or sharded."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.tensor import LazyTensor
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.hf_config import (
    load_config,
    quant_method,
    quantization,
    with_modelopt_file,
)
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import heads_for_words, inner_names
from megaconv.families.parts.llama_vision import LlamaInside, llama_inside
from megaconv.families.parts.whole_model import split_whole
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.quantization_files import with_quantization_file
from megaconv.huggingface.stored_names import (
    is_of_bare_model,
    renamed,
    with_names_of_family,
    without_wrappers,
)
from megaconv.huggingface.weight_files import (
    has_weights,
    read_directory,
    require_counted,
)
from megaconv.loader import Loader
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF, HF_STACKED
from megaconv.options import LoadOptions
from megaconv.values import fp8, modelopt_mixed
from megaconv.values.compressed_tensors import scheme_of
from megaconv.values.quantized import dequantize

_log = logging.getLogger("megaconv")


def detect(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() and has_weights(path)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a directory. Raises CheckpointError unless it is a complete model of a known family."""
    directory = options.config or path
    family, config = read_config(
        directory / CONFIG_NAME,
        text_only=options.text_only,
        whole=options.whole,
        own_names=options.own_names,
    )
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    weights, stored = read_directory(path)
    if config.own_names is not None and weights.name.endswith(".index.json"):
        require_counted(weights)
    where = str(weights)
    llama = llama_inside(directory / CONFIG_NAME)
    quantized = _quantized_config(path, directory, config, stored)
    stored = stored if config.own_names else without_wrappers(stored, where)
    found = dequantize(stored, quantized, options.dtype, where)
    left_out: dict[str, int] = {}
    beside: dict[str, LazyTensor] = {}
    stays_quantized = config.own_names is not None and config.own_names.stays_quantized
    if llama is not None and not stays_quantized:  # quantized weights have other names
        llama.require_layers(without_wrappers(found, where), where)
    if options.text_only:
        found, config, left_out = _language_model(found, config, family, llama, where)
    elif config.whole is not None:
        found, beside, config = split_whole(found, config, family.rows, where)
        config = _tied_without_head(config, found, family)
    if is_of_bare_model(found, family):
        config = _without_its_head(config, found, family, where)
    found = with_names_of_family(found, family, where)
    found = _without_words(found, config, family, where)
    # MXFP4 stores experts as rows, while plain weights may be transposed.
    method = quant_method(quantized, where)
    naming = HF_STACKED if method == "mxfp4" else HF
    config, tensors = whole_model(
        family, config, naming, found | beside, where, has_zero_biases=method == "gptq"
    )
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source=f"hf, {_kind(weights)}{_scheme(quantized, where)}",
        beside=left_out,
    )
    return OpenedSource(header, tensors)


def _quantized_config(
    path: Path, directory: Path, config: ModelConfig, names: Iterable[str]
) -> Mapping[str, Any]:
    """The config.json that describes the weights' quantization: beside the weights if there is one.

    directory: that of the model's config.json. names: those of the stored tensors. Empty if the tensors stay as they
    are stored.
    """
    beside_weights = path if (path / CONFIG_NAME).is_file() else directory
    described = load_config(beside_weights / CONFIG_NAME)
    if config.own_names is not None and config.own_names.stays_quantized:
        return {}
    return with_quantization_file(with_modelopt_file(described, path), path, names)


def _language_model(
    found: Mapping[str, LazyTensor],
    config: ModelConfig,
    family: Family,
    llama: LlamaInside | None,
    where: str,
) -> tuple[dict[str, LazyTensor], ModelConfig, dict[str, int]]:
    """(tensors by the names of the standalone language model, its configuration, counts of the tensors left out).

    llama: the language model, if it is the Llama inside a Llama 3.2 Vision. The configuration has tied embeddings if the
    files hold no head.
    """
    names = inner_names(found, family.rows)
    left_out = Counter(_module(name) for name in found if name not in names)
    kept = renamed(found, names, where)
    if llama is not None:
        kept, more_left_out = llama.take(kept, where)
        return kept, config, left_out | more_left_out
    return kept, _tied_without_head(config, kept, family), dict(left_out)


def _module(name: str) -> str:
    """The module of a tensor, for people: `model.visual` or `lm_head`."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "model" else words[0]


def _tied_without_head(config: ModelConfig, names: Collection[str], family: Family) -> ModelConfig:
    """The configuration, with tied embeddings if no name is that of a head in any form of Hugging Face's files.

    A model with a head of scores has none for words.
    """
    if config.has("scores"):
        return config
    heads = heads_for_words(family.rows)
    return config if heads & set(names) else changed(config, {"tie_embeddings": True})


def _without_words(
    found: dict[str, LazyTensor], config: ModelConfig, family: Family, where: str
) -> dict[str, LazyTensor]:
    """The tensors without a head for words, if the class has a head of scores in its place. Some files hold both."""
    heads = heads_for_words(family.rows)
    if not config.has("scores") or not heads & found.keys():
        return found
    _log.warning("%s: the head for words is left out, which the model's class doesn't have", where)
    return {name: tensor for name, tensor in found.items() if name not in heads}


def _without_its_head(
    config: ModelConfig, names: Collection[str], family: Family, where: str
) -> ModelConfig:
    """The configuration of a bare model. If its files hold no head, its embeddings are tied, as no other head is known."""
    tied = _tied_without_head(config, names, family)
    if tied.tie_embeddings and not config.tie_embeddings:
        _log.warning(
            "%s: holds a model without a head, as an embedding model is; the output's embedding is tied to its head",
            where,
        )
    return tied


def _scheme(config: Mapping[str, Any], where: str) -> str:
    """The quantization of the weights in the files, for people: `, gptq (4 bits)`; empty for plain weights."""
    method = quant_method(config, where)
    if method is None:
        return ""
    details = _details(method, quantization(config), where)
    return f", {method} ({details})" if details else f", {method}"


def _details(method: str, settings: Mapping[str, Any], where: str) -> str:
    """The form of the quantized weights, for people. The settings have passed `dequantize`."""
    if method == "compressed-tensors":
        return scheme_of(settings, where)
    if method == "fp8":
        return fp8.described(settings, where)
    if method == "fbgemm_fp8":
        return "one scale for each row"
    if method == "modelopt" and modelopt_mixed.is_mixed(settings):
        return ", ".join(modelopt_mixed.algorithms_of(settings, where))
    if method == "modelopt":
        return str(settings["quant_algo"])
    if method in ("gptq", "awq"):
        return f"{settings['bits']} bits"
    if method == "bitsandbytes":
        widths = {"load_in_4bit": "4 bits", "load_in_8bit": "8 bits"}
        return next((text for key, text in widths.items() if settings.get(key)), "")
    return ""


def _kind(weights: Path) -> str:
    return "safetensors" if "safetensors" in weights.name else "torch .bin"


LOADER = Loader(
    name="hf",
    description="Hugging Face transformers: config.json with *.safetensors or *.bin",
    detect=detect,
    open=open,
    keeps_names=True,
    reads_files=False,
    has_text_only=True,
)
