"""Hugging Face directories: config.json, tokenizer files and safetensors in shards, ready for from_pretrained."""

import logging
from collections.abc import Mapping, Sequence

from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout, index_json, shard
from formats.tensor import ITEMSIZE, LazyTensor, Shape, byte_count, matrix_shape
from megaconv.engine.base_model import BaseModel, CopiedTensors, open_base
from megaconv.engine.hf_quantization import lossy, quantization_files, quantized_forms, with_scales
from megaconv.engine.plan import OutputPlan, Placement, native_dtype
from megaconv.engine.sidecars import copies
from megaconv.engine.stored_forms import Form
from megaconv.engine.weight_files import hf_namings
from megaconv.families import Family, family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.beside import Whole
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF, Naming
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.options import SaveOptions

DESCRIPTION = "Hugging Face transformers: config.json with sharded *.safetensors"

HOLDS_WHOLE = True
READS_BACK = True
"""Whether our loader reads what `forms` stores."""

_log = logging.getLogger("megaconv")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that choose something."""
    return ("max_shard_bytes", "base", "quantize")


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """Those of the weights that are to be quantized. Raises UsageError and NotExpressible for what can't be."""
    if options.quantize is None:
        return {}
    natives = _natives(family(header.config.family), header.config, HF)
    return quantized_forms([native for native in natives if native.copy is None], header, options)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises NotExpressible when the family has no config.json for this model, TensorMismatch for a base of another one."""
    config, table = header.config, family(header.config.family)
    if config.head.activation and "activation" in options.allow_lossy:
        config = changed(config, {"head.activation": config.mlp.activation})
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(table.config_json(config))}
    files |= copies(header.files)
    overflow = "overflow" in options.allow_lossy
    base = open_base(options.base, config.dtype, overflow=overflow) if options.base is not None else None
    own = HF if config.whole is None else Naming("hf", config.whole.experts)
    listed = _natives(table, config, own) if base is None else _as_in(base, table, config)
    natives = [native for native in listed if native.copy is None or native.copy.written]
    if options.quantize is not None:
        described = quantization_files(CONFIG_NAME, table.config_json(config), natives, header, options.quantize)
        files |= {name: PlainFile(content) for name, content in described.items()}
        natives = [each for native in natives for each in with_scales(native, header)]
    called = Whole({}).hf_name if config.whole is None else config.whole.hf_name
    names, copied, added = (
        {native.name: called(native.name) for native in natives},
        dict[str, LazyTensor](),
        list[str](),
    )
    if base is not None:
        names = base.names_of(_shapes(natives), {native.name for native in listed})
        copied = base.missing(set(names.values()), table.ignored)
        more = {name: path for name, path in base.files().items() if name not in files}
        files |= copies(more)
        files[CONFIG_NAME] = PlainFile(base.config_json(config.dtype))
        added = [*copied, *more]
    else:
        _warn_of_missing_mtp(config)
    ours = [(names[native.name], native.shape, native_dtype(header, native)) for native in natives]
    file_of = _shards(files, ours, copied, options.max_shard_bytes)
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        row_bytes, record = matrix_shape(native.shape)[1] * ITEMSIZE[native_dtype(header, native)], names[native.name]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(Placement(file_of[record], record, row_bytes, regions))
    # Only Megatron's checkpoints have a layout: from another source nothing passes between two ways to compute the model.
    notices = table.notices(config) if header.layout is not None else ()
    if options.quantize is not None:
        notices = (*notices, lossy(options.quantize))
    return OutputPlan(files, placements, notices=notices, from_base=added)


def _natives(table: Family, config: ModelConfig, naming: Naming) -> list[NativeTensor]:
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    return list(native_tensors(table.rows, config, naming, Layout(), 0, whole, config.vocab))


def _as_in(base: BaseModel, table: Family, config: ModelConfig) -> list[NativeTensor]:
    """Spelled as the original has them: experts each for itself, or all of a layer in one tensor."""
    spelled = [_natives(table, config, naming) for naming in hf_namings(base.tensors)]
    return max(spelled, key=lambda natives: base.fitting(_shapes(natives)))


def _shapes(natives: Sequence[NativeTensor]) -> dict[str, Shape]:
    return {native.name: native.shape for native in natives}


def _shards(
    files: dict[str, FileLayout],
    ours: Sequence[tuple[str, Shape, str]],
    copied: Mapping[str, LazyTensor],
    max_shard_bytes: int,
) -> dict[str, str]:
    """Add all weight files, those that are copied last, and their index; returns the file of each tensor."""
    others = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in copied.items()]
    written, taken = shard(ours, max_shard_bytes), shard(others, max_shard_bytes) if others else []
    count = len(written) + len(taken)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name, members in zip(names, written, strict=False):
        files[name] = SafetensorsLayout({tensor: (shape, dtype) for tensor, shape, dtype in members})
    for name, members in zip(names[len(written) :], taken, strict=True):
        files[name] = CopiedTensors({tensor: copied[tensor] for tensor, _, _ in members})
    file_of = {
        tensor: name for name, members in zip(names, [*written, *taken], strict=True) for tensor, _, _ in members
    }
    if count > 1:
        total = sum(byte_count(shape, dtype) for _, shape, dtype in (*ours, *others))
        files["model.safetensors.index.json"] = PlainFile(index_json(file_of, total))
    return file_of


def _warn_of_missing_mtp(config: ModelConfig) -> None:
    promised = (config.hf or {}).get("num_nextn_predict_layers") or 0
    if promised and not config.mtp_layers:
        _log.warning(
            "%s lists %s MTP layers, which the source doesn't hold%s",
            CONFIG_NAME,
            promised,
            "" if config.whole else "; --base ORIGINAL adds them",
        )
