"""Hugging Face directories: config.json, tokenizer files and sharded safetensors, ready for from_pretrained."""

import logging
from collections.abc import Sequence

from formats.output import FileLayout, PlainFile
from formats.tensor import LazyTensor, Shape
from formats.wording import counted
from megaconv.engine.base_model import BaseModel, open_base
from megaconv.engine.files_of_original import files_of_original
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.engine.sentence_directory import plan_sentence_directory
from megaconv.engine.sidecars import copies, small_files
from megaconv.engine.weight_files import add_weight_files
from megaconv.families import Family, family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import heads_for_words
from megaconv.families.parts.scores import HEAD, HEAD_OPTION, SCORES, with_asked_class
from megaconv.huggingface.packed import OPTIONS
from megaconv.huggingface.quantization import (
    notices,
    quantized_forms,
    require_described,
    require_quantization,
)
from megaconv.huggingface.quantization_config import quantization_files
from megaconv.huggingface.scales import with_scales
from megaconv.huggingface.spellings import hf_namings
from megaconv.huggingface.stored_names import prefix_of
from megaconv.model.beside import Whole
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key
from megaconv.model.naming import HF, HF_STACKED, Naming
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.options import MXFP4, SaveOptions
from megaconv.saver import Saver
from megaconv.values.forms import Form

_log = logging.getLogger("megaconv")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("max_shard_bytes", "base", "quantize", "kv_cache", "calibration")


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The storage forms of the weights that are quantized. Raises UsageError and NotExpressible for unsupported
    requests."""
    require_quantization(options)
    if options.quantize is None or header.config.has("retriever"):
        return {}
    natives = _natives(family(header.config.family), header.config, _own_naming(options))
    return quantized_forms([native for native in natives if native.copy is None], header, options)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output.

    Raises NotExpressible if the family has no config.json for this model, and TensorMismatch if --base is another
    model.
    """
    if header.config.has("retriever"):
        return plan_sentence_directory(header, options)
    table, config = family(header.config.family), _written_config(header.config, options)
    config_json = table.config_json(config, header.training.arguments)
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(config_json)}
    files |= small_files(header)
    base = _open_base(config, options)
    listed = _listed(table, config, base, options)
    natives = [native for native in listed if native.copy is None or native.copy.written]
    if options.quantize is not None:
        described = quantization_files(CONFIG_NAME, config_json, natives, header, options)
        require_described(table, described[CONFIG_NAME], options.quantize)
        files |= {name: PlainFile(content) for name, content in described.items()}
        natives = [
            each for native in natives for each in with_scales(native, header, options.quantize)
        ]
    if base is None:
        _warn_of_missing_mtp(config)
        names, copied = _names(natives, config), dict[str, LazyTensor]()
        last_rows = dict[str, LazyTensor]()
        from_base: list[str] = []
        told: tuple[str, ...] = ()
    else:
        new_head = _new_head(base, natives)
        stated = {name: shape for name, shape in _shapes(natives).items() if name not in new_head}
        optional = {native.name for native in listed} - new_head
        if config.has("scores"):
            optional |= heads_for_words(table.rows)
        names = base.names_of(stated, optional) | {name: name for name in new_head}
        copied = base.missing(set(names.values()), table.ignored)
        last_rows = base.last_rows(names, header)
        original = files_of_original(base, header, config, files)
        files |= copies(original.copied)
        files[CONFIG_NAME] = PlainFile(original.config_json)
        from_base = [*copied, *original.copied]
        told = original.notices
    ours: list[tuple[str, Shape, str]] = []
    for native in natives:
        name = names[native.name]
        shape = _completed(native.shape, last_rows.get(name))
        ours.append((name, shape, native_dtype(header, native)))
    file_of = add_weight_files(
        files, ours, options.max_shard_bytes, copied=copied, last_rows=last_rows
    )
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        record = names[native.name]
        add_placements(placements, header, native, file_of[record], record)
    told = (*_notices(header, config, options, listed), *told)
    return OutputPlan(files, placements, notices=told, from_base=from_base)


def _written_config(config: ModelConfig, options: SaveOptions) -> ModelConfig:
    """The configuration for config.json, with the class that the user asks for. BERT's head gets the activation of its
    layers if the user accepts this loss."""
    config = with_asked_class(config, options.extra.get(HEAD))
    if config.head.activation and "activation" in options.allow_lossy:
        return changed(config, {"head.activation": config.mlp.activation})
    return config


def _open_base(config: ModelConfig, options: SaveOptions) -> BaseModel | None:
    if options.base is None:
        return None
    return open_base(
        options.base,
        config.dtype,
        overflow="overflow" in options.allow_lossy,
        is_llama=config.family == "llama",
    )


def _own_naming(options: SaveOptions) -> Naming:
    """The naming scheme of an output without an original model. MXFP4 stores the rows of all experts in one tensor."""
    return HF_STACKED if options.quantize == MXFP4 else HF


def _listed(
    table: Family, config: ModelConfig, base: BaseModel | None, options: SaveOptions
) -> list[NativeTensor]:
    """All native tensors, in the spelling of the original model if there is one."""
    if base is not None:
        return _as_in(base, table, config)
    if config.whole is not None:
        return _natives(table, config, Naming("hf", config.whole.experts))
    return _natives(table, config, _own_naming(options))


def _names(natives: Sequence[NativeTensor], config: ModelConfig) -> dict[str, str]:
    """The name in the output of each native tensor. In a multimodal model, the language model's names have a prefix."""
    whole = Whole({}) if config.whole is None else config.whole
    return {native.name: whole.hf_name(native.name) for native in natives}


def _notices(
    header: Header, config: ModelConfig, options: SaveOptions, natives: Sequence[NativeTensor]
) -> tuple[str, ...]:
    # Only Megatron's checkpoints have a layout. From another source, the model doesn't move to software that computes
    # it differently.
    is_of_megatron = header.layout is not None
    of_family = tuple(family(config.family).notices(config)) if is_of_megatron else ()
    if options.quantize is None:
        return of_family
    return (*of_family, *notices(natives, header, options))


def _natives(table: Family, config: ModelConfig, naming: Naming) -> list[NativeTensor]:
    """The native tensors of a model. Without a head, its class has their names without the prefix."""
    natives = list(unsharded_tensors(table.rows, config, naming))
    if not table.is_bare(config):
        return natives
    prefix = prefix_of(table)
    return [native._replace(name=native.name.removeprefix(prefix)) for native in natives]


def _as_in(base: BaseModel, table: Family, config: ModelConfig) -> list[NativeTensor]:
    """The native tensors in the spelling of the original model: experts as separate tensors, or one tensor per layer."""
    spelled = [_natives(table, config, naming) for naming in hf_namings(base.tensors)]
    return max(spelled, key=lambda natives: base.fitting(_shapes(natives)))


def _new_head(base: BaseModel, natives: Sequence[NativeTensor]) -> set[str]:
    """The names of a head of scores that the original doesn't have: it is a model with a head for words."""
    of_scores = {row.canonical for row in SCORES}
    return {native.name for native in natives if native.name in of_scores} - base.tensors.keys()


def _completed(shape: Shape, last_rows: LazyTensor | None) -> Shape:
    """The shape of a tensor with further rows at its end."""
    return shape if last_rows is None else (shape[0] + last_rows.shape[0], *shape[1:])


def _shapes(natives: Sequence[NativeTensor]) -> dict[str, Shape]:
    return {native.name: native.shape for native in natives}


def _warn_of_missing_mtp(config: ModelConfig) -> None:
    promised = (config.hf or {}).get("num_nextn_predict_layers") or 0
    if promised and not config.mtp_layers:
        _log.warning(
            "%s lists %s, which the source doesn't hold%s",
            CONFIG_NAME,
            counted(promised, "MTP layer"),
            "" if config.whole else "; --base ORIGINAL adds what is missing",
        )


SAVER = Saver(
    name="hf",
    description="Hugging Face transformers: config.json with sharded *.safetensors",
    plan=plan,
    holds_scores=True,
    options={**OPTIONS, **HEAD_OPTION},
    uses=uses,
    holds_whole=True,
    keeps_names=True,
    forms=forms,
    reads_back=True,
)
