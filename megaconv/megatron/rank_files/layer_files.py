"""Megatron-DeepSpeed's pipeline checkpoints: a file for every module of the pipeline and every tensor rank.

    layer_01-model_00-model_states.pt        the embedding: word_embeddings.weight ...; tied, the head as well
    layer_03-model_00-model_states.pt        the first layer, by the names that it has in legacy Megatron: input_layernorm.weight ...
    layer_08-model_00-model_states.pt        the norm after the last one: weight, bias
    layer_09-model_00-model_states.pt        an untied head: lm_head.weight
    mp_rank_00_model_states.pt               no parameters: args, iteration, checkpoint_version

Numbers count every module of the pipeline. Modules without parameters have no file, so some numbers are missing.
Tensors are sharded, and q, k, v interleaved, as in legacy Megatron since checkpoint version 2. --config describes the
model. This was not tested with a file of the real software. Source: gpt_model.py of Megatron-DeepSpeed, PipelineModule
of deepspeed 0.19.
"""

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import rank_files, torch_zip
from formats.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.errors import UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.arguments.size_tensors import LEGACY_SIZE_TENSORS
from megaconv.megatron.rank_files.source import RankSource, Spellings, open_model
from megaconv.megatron.states.legacy_names import MODEL, present
from megaconv.megatron.states.ranks import RankId, ranks_of_models
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import LEGACY
from megaconv.options import LoadOptions

_FILE = re.compile(r"layer_(\d{2,6})-model_(\d{2,5})-model_states\.pt")
_STATE = "mp_rank_00_model_states.pt"
_NORM = {"weight", "bias"}
_HEADS = ("lm_head.weight", "weight")

_log = logging.getLogger("megaconv")


def holds_layer_files(step: Path) -> bool:
    return step.is_dir() and any(_FILE.fullmatch(child.name) for child in step.glob("layer_*"))


def open_layer_files(step: Path, options: LoadOptions) -> OpenedSource:
    """Open a pipeline checkpoint.

    Raises CheckpointError for a checkpoint that is incomplete, or that doesn't fit the configuration.
    """
    if options.config is None:
        raise UsageError(
            f"{step}: the settings of Megatron-DeepSpeed are not read; give --config with the Hugging Face directory of the model",
            code="config-needed",
        )
    state = _dictionary(step / _STATE) if (step / _STATE).is_file() else {}
    version = state.get("checkpoint_version")
    if version in (0, 1):
        raise UnsupportedInput(
            f"{step / _STATE}: has checkpoint version {version}; 2 and later ones are read"
        )
    if any(step.glob("*_optim_states.pt")) and options.optimizer:
        _log.warning("%s: the optimizer of a DeepSpeed pipeline is not read", step)
    files = _files(step)
    models = {rank: _model(found) for rank, found in files.items()}
    ranks = ranks_of_models(
        models, {rank: found[min(found)] for rank, found in files.items()}, step
    )
    _, config = read_config(options.config / CONFIG_NAME)
    fused = config.mlp.activation == "gelu_tanh"  # no tensor shows this
    args = Namespace(
        untie_embeddings_and_output_weights=not config.tie_embeddings, bias_gelu_fusion=fused
    )
    iteration = state.get("iteration")
    listing = rank_files.RankFiles(step, iteration if type(iteration) is int else None, {})
    described = "deepspeed, layer files of a Megatron-DeepSpeed pipeline"
    return open_model(
        RankSource(listing, ranks, args), options, Spellings(LEGACY_SIZE_TENSORS, LEGACY, described)
    )


def _files(step: Path) -> dict[RankId, dict[int, Path]]:
    """Files by tensor rank and number of the module.

    Raises CorruptCheckpoint unless every rank has the same modules.
    """
    found: dict[RankId, dict[int, Path]] = {}
    for child in sorted(step.iterdir()):
        match = _FILE.fullmatch(child.name)
        if match is None:
            continue
        of_rank = found.setdefault(RankId(int(match[2]), 0, 0), {})
        if of_rank.setdefault(int(match[1]), child) != child:
            raise CorruptCheckpoint(
                f"{child}: is another file of a module that has one; keep one run's"
            )
    modules = {number: path for files in found.values() for number, path in files.items()}
    for rank, files in found.items():
        missing = sorted(modules.keys() - files.keys())
        if missing:
            name = modules[missing[0]].name
            raise CorruptCheckpoint(
                f"{step}: tensor rank {rank.tp} has none of {name}'s module", code="missing-file"
            )
    return found


def _model(files: Mapping[int, Path]) -> dict[str, Any]:
    """A rank's parameters under legacy Megatron's names.

    Raises UnsupportedInput for a module that legacy Megatron doesn't have.
    """
    model: dict[str, Any] = {}
    layers: list[int] = []
    for number, path in sorted(files.items()):
        held = {
            name: value
            for name, value in _dictionary(path).items()
            if not name.endswith("_extra_state")
        }
        if any(name.startswith("input_layernorm.") for name in held) and not _is_embedding(held):
            prefix = f"{MODEL}.encoder.layers.{len(layers)}."
            layers.append(number)
        else:
            prefix, held = _end_of_model(held, path)
        for name, value in held.items():
            if model.setdefault(present(prefix + name), value) is not value:
                raise CorruptCheckpoint(f"{path}: {name} is there a second time")
    if layers and layers != list(range(layers[0], layers[0] + len(layers))):
        after = next(number for number in layers if number + 1 not in layers)
        raise CorruptCheckpoint(
            f"{files[after].parent}: the file of the layer after {files[after].name} is missing",
            code="missing-file",
        )
    return model


def _is_embedding(held: Mapping[str, Any]) -> bool:
    return any(name.endswith("word_embeddings.weight") for name in held)


def _is_vector(value: Any) -> bool:
    return len(getattr(value, "shape", ())) == 1


def _end_of_model(held: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """(prefix of the names, parameters by name) of a module before or after the layers: embedding, last norm or head.

    Raises UnsupportedInput for any other module.
    """
    if _is_embedding(held):
        short = {name.removeprefix("embedding."): value for name, value in held.items()}
        return f"{MODEL}.embedding.", short
    if held and held.keys() <= _NORM and all(map(_is_vector, held.values())):
        return f"{MODEL}.encoder.final_norm.", dict(held)
    if len(held) == 1:
        ((name, value),) = held.items()
        if name in _HEADS:
            return f"{MODEL}.output_layer.", {"weight": value}
    raise UnsupportedInput(
        f"{path}: holds {', '.join(sorted(held))[:200] or 'nothing'}, which is neither an embedding, a layer, a norm nor a head "
        "of Megatron-DeepSpeed's GPT; models of other software (GPT-NeoX ...) are not supported"
    )


def _dictionary(path: Path) -> dict[str, Any]:
    held = torch_zip.read(path)
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise CorruptCheckpoint(
            f"{path}: expected a dictionary of tensors, found {type(held).__name__}"
        )
    return held
