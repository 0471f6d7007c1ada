"""Directories for sentence-transformers: the towers of a biencoder as text embedders.

    query/  context/                  or the whole directory, if both have one tower
      modules.json                    the modules below, in the order of their computation
      config.json, model.safetensors  transformers' MegatronBertModel, without its pooler
      sentence_bert_config.json       the longest text
      1_Pooling/config.json           the first token
      2_Dense/                        the pooler (tanh) if there is one, then the projection (identity)
      vocab.txt ...                   the tokenizer

Source: sentence_transformers.models (Transformer, Pooling, Dense), releases 2 to 6.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from formats import safetensors
from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout
from formats.tensor import LazyTensor
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.engine.sidecars import small_files
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.families.biencoder import TOWERS
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key
from megaconv.model.naming import HF
from megaconv.model.natives import unsharded_tensors
from megaconv.model.retrieving import Retriever
from megaconv.options import SaveOptions

_WEIGHTS = "model.safetensors"
_BERT, _POOLER, _PROJECTION = "bert.", "bert.pooler.dense.", "projection."
_MODULES = "sentence_transformers.models."
_TANH, _IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
_VOCABULARY, _TOKENIZER = "vocab.txt", "tokenizer_config.json"


class _Place(NamedTuple):
    """The file of a tensor below its tower's directory, and its name there."""

    file: str
    name: str


def plan_sentence_directory(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises UsageError for options that these directories don't have."""
    for name, value in (("base", options.base), ("quantize", options.quantize)):
        if value is not None:
            raise UsageError(
                f"--{name} is for language models; a biencoder is written as it is, so leave it out"
            )
    config = header.config
    natives = list(unsharded_tensors(family(config.family).rows, config, HF))
    files: dict[str, FileLayout] = {}
    placements: dict[Key, list[Placement]] = {}
    for tower, feature in TOWERS.items():
        if not config.has(feature):
            continue
        directory = "" if tower == "shared" else f"{tower}/"
        files |= dict(_small_files(header, directory))
        own = [native for native in natives if native.name.startswith(f"{tower}.")]
        by_file: dict[str, dict[str, tuple[Any, str]]] = {}
        for native in own:
            place = _place(native.name.removeprefix(f"{tower}."), config)
            path = directory + place.file
            entry = native.shape, native_dtype(header, native)
            by_file.setdefault(path, {})[place.name] = entry
            add_placements(placements, header, native, path, place.name)
        files |= {path: SafetensorsLayout(tensors) for path, tensors in by_file.items()}
    weight_files = tuple(path for path in files if path.endswith(_WEIGHTS))
    return OutputPlan(files, placements, read_back=partial(_read_back, weight_files))


def _read_back(weight_files: tuple[str, ...], directory: Path) -> dict[str, LazyTensor]:
    """The tensors of an output by file and name. No loader reads these directories."""
    found: dict[str, LazyTensor] = {}
    for file in weight_files:
        tensors = safetensors.read(directory / file)
        found |= {f"{file}/{name}": tensor for name, tensor in tensors.items()}
    return found


def _place(name: str, config: ModelConfig) -> _Place:
    """The place of a tower's tensor. name: its name in the tower."""
    if name.startswith(_POOLER):
        return _Place(f"2_Dense/{_WEIGHTS}", f"linear.{name.removeprefix(_POOLER)}")
    if name.startswith(_PROJECTION):
        number = 3 if config.retriever.pooler else 2
        return _Place(f"{number}_Dense/{_WEIGHTS}", f"linear.{name.removeprefix(_PROJECTION)}")
    return _Place(_WEIGHTS, name.removeprefix(_BERT))


def _small_files(header: Header, directory: str) -> Iterator[tuple[str, FileLayout]]:
    """Yield the files of a tower without weights, by path."""
    config = header.config
    described: dict[str, Any] = {
        CONFIG_NAME: _tower_config(config),
        "sentence_bert_config.json": {
            "max_seq_length": config.max_positions,
            "do_lower_case": False,
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.hidden,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    }
    modules = ["Transformer", "Pooling"]
    for width, activation in _dense_layers(config):
        described[f"{len(modules)}_Dense/config.json"] = {
            "in_features": config.hidden,
            "out_features": width,
            "bias": True,
            "activation_function": activation,
        }
        modules.append("Dense")
    described["modules.json"] = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{module}" if number else "",
            "type": _MODULES + module,
        }
        for number, module in enumerate(modules)
    ]
    if _VOCABULARY in header.files and _TOKENIZER not in header.files:
        described[_TOKENIZER] = _tokenizer_config(header)
    for name, content in described.items():
        yield directory + name, PlainFile(json.dumps(content, indent=2).encode() + b"\n")
    for name, file in small_files(header).items():
        yield directory + name, file


def _dense_layers(config: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yield (width, activation) of each linear layer behind the first token."""
    if config.retriever.pooler:
        yield config.hidden, _TANH
    if config.retriever.projection:
        yield config.retriever.projection, _IDENTITY


def _tower_config(config: ModelConfig) -> Mapping[str, Any]:
    """The config.json of a tower. Raises NotExpressible for a tower that transformers' class doesn't compute."""
    head = {"head.activation": config.mlp.activation, "tie_embeddings": True}
    plain = replace(config, family="bert", retriever=Retriever(), hf=None)
    written = family("bert").write_hf(changed(plain, head))
    return {**written, "architectures": ["MegatronBertModel"]}


def _tokenizer_config(header: Header) -> Mapping[str, Any]:
    """The description of a vocabulary of BERT, for transformers."""
    kind = header.training.arguments.get("tokenizer_type")
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": kind != "BertWordPieceCase",
        "model_max_length": header.config.max_positions,
    }
