"""Named tensors of whole models in safetensors or torch files, with or without an index, and the model they form."""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from formats import safetensors, torch_zip
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.families.parts.keys import WEIGHT_NAMES
from megaconv.families.parts.scores import require_scores_of_class, with_stored_bias
from megaconv.huggingface.other_files import complete_shards, weights_inside
from megaconv.huggingface.zero_biases import without_zero_biases
from megaconv.model.assembled import Placed, assemble
from megaconv.model.check import listing, same_names
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import (
    HF,
    HF_FUSED,
    HF_FUSED_HALVED,
    HF_SEPARATE,
    HF_STACKED,
    HF_STACKED_TRANSPOSED,
    Naming,
    with_mtp_stacked,
)
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.table import canonical_shapes

_log = logging.getLogger("megaconv")

_SEPARATE = (
    *(".block_sparse_moe.", ".mlp.gate.weight_1", ".attention.wkv_b."),
    "L_module.layers.0.self_attn.",
)
"""Parts of names in files in which each expert has tensors of its own, under other names than in transformers' class:
names of Mixtral's, the second router of ERNIE 4.5 VL, and Mistral Large 4's latent attention. The last is of transformers'
class of HRM-Text, whose published files have q, k, v and a gate in one tensor."""
_FUSED = ".self_attn.att_proj."
"""Part of the names of files with q, k and v in one tensor, under other names than those of transformers' class."""
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""Suffixes of tensors with all experts of a layer.

transformers 5 has them; Qwen 3 VL on the Hub has each one transposed.
"""
_OF_CLASS = ".self_attn.g_proj."
"""Part of the names that transformers' class has for a tensor of LFM 3, whose published files have another name for it."""
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+(\.safetensors|\.bin)")
"""File names of parts of a model, to which an index belongs."""
_COUNT = re.compile(r"-\d+-of-(\d{1,9})\.\w+$")
"""The end of the name of such a file, with their number."""
_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def is_weights(path: Path) -> bool:
    """True if a file of a Hugging Face directory holds weights or is their index."""
    return path.name.endswith(_SUFFIXES)


def has_weights(path: Path) -> bool:
    """True if a directory has a weight file with one of the names that transformers looks for."""
    return any((path / name).is_file() for name in WEIGHT_NAMES) or bool(complete_shards(path))


def read_directory(path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The weight file that decides how a Hugging Face directory is read, and every tensor by its name."""
    for name in WEIGHT_NAMES:
        weights = path / name
        if not weights.is_file():
            continue
        if name.endswith(".index.json"):
            return weights, read_sharded(weights)
        index = path / f"{name}.index.json"
        if index.is_file() and not _is_index_of(name, index):
            _log.warning(
                "%s: holds %s and %s, two models; %s is read, as in transformers. Remove the other one",
                path,
                name,
                index.name,
                name,
            )
        return weights, read_file(weights)
    shards = complete_shards(path)
    if not shards:
        raise no_weights(path)
    return shards[0], _read_shards(shards)


def _read_shards(shards: Sequence[Path]) -> dict[str, LazyTensor]:
    """All tensors of a model in several files without an index. Raises TensorMismatch for a name in two of them."""
    found: dict[str, LazyTensor] = {}
    for file in shards:
        tensors = read_file(file)
        twice = found.keys() & tensors.keys()
        if twice:
            raise TensorMismatch(f"{file}: holds {min(twice)}, which another shard holds too")
        found |= tensors
    return found


def _is_index_of(name: str, index: Path) -> bool:
    """True if an index names this file alone, as mlx-lm writes it."""
    try:
        return set(safetensors.read_index(index).values()) == {name}
    except CheckpointError:
        return False


def no_weights(path: Path) -> CorruptCheckpoint:
    """The error for a directory with a config.json, or for that file itself, if weights are needed."""
    if path.is_file():
        what = "is a configuration; give the directory that holds the weights too"
    else:
        what = "has a config.json but no weights" + _found_instead(path)
    return CorruptCheckpoint(f"{path}: {what}", code="missing-file")


def _found_instead(path: Path) -> str:
    """The rest of a message about missing weights: shards without their index, or files of other names."""
    others = sorted(entry.name for entry in path.iterdir() if is_weights(entry))
    shard = next((name for name in others if _SHARD.fullmatch(name)), None)
    if shard is not None:
        index = _SHARD.sub(r"\1\2.index.json", shard)
        return f" that can be found: {index} is missing, which lists {listing(others)}; download it too"
    held = f"; it holds {listing(others)}" if others else ""
    return f"{held}; expected one of {', '.join(WEIGHT_NAMES)}"


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch-saved file of any other name."""
    if path.suffix == ".safetensors":
        return dict(safetensors.read(path))
    value = torch_zip.read(path)
    if not isinstance(value, Mapping):
        found = type(value).__name__
        raise CorruptCheckpoint(f"{path}: expected a dictionary of tensors, found {found}")
    value = weights_inside(value)
    for name, tensor in value.items():
        is_tensor = hasattr(tensor, "read_into")
        if not isinstance(name, str) or not is_tensor:
            raise CorruptCheckpoint(
                f"{path}: {name!r} is not a tensor; expected a dictionary of tensors, or one under a key such as state_dict"
            )
    return dict(value)


def read_sharded(index: Path) -> dict[str, LazyTensor]:
    """All tensors of a model in several files, in the order of its index.

    Raises TensorMismatch if index and files disagree.
    """
    files = safetensors.read_index(index)
    _require_shards(index, sorted(set(files.values())))
    shards = {name: read_file(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise TensorMismatch(
                f"{index}: assigns {name} to {file}, but the file doesn't hold it",
                code="missing-tensor",
            )
    for file, tensors in shards.items():
        _require_placed(tensors, file, files, index)
    return {name: shards[file][name] for name, file in files.items()}


def require_counted(index: Path) -> None:
    """Raise TensorMismatch if an index names fewer files than their names count, such as two of `-of-00003`.

    For a model without a family: nothing else shows that tensors are missing.
    """
    files = set(safetensors.read_index(index).values())
    counts = {int(match[1]) for name in files if (match := _COUNT.search(name))}
    if counts and len(files) < max(counts):
        raise TensorMismatch(
            f"{index}: names {counted(len(files), 'file')} of the {max(counts)} that the names of these files count; copy the whole model",
            code="missing-tensor",
        )


def _require_shards(index: Path, names: Collection[str]) -> None:
    """Raises CorruptCheckpoint if files are missing."""
    missing = [name for name in names if not os.path.exists(index.parent / name)]  # noqa: PTH110
    if missing:
        # Path.exists raises OSError for names that are too long.
        raise CorruptCheckpoint(
            f"{index.parent / missing[0]}: no such file; {index.name} names {counted(len(names), 'file')}, {len(missing)} of them missing: "
            f"{listing(missing)}. Download or copy them too",
            code="missing-file",
        )


def _require_placed(
    tensors: Collection[str], file: str, files: Mapping[str, str], index: Path
) -> None:
    """Raise TensorMismatch for a tensor in a file that the index places elsewhere, or nowhere."""
    for name in tensors:
        if files.get(name) != file:
            raise TensorMismatch(
                f"{index.parent / file}: holds {name}, which {index.name} doesn't place there"
            )


def renamed(
    tensors: Mapping[str, LazyTensor], names: Mapping[str, str], where: str
) -> dict[str, LazyTensor]:
    """The tensors that have a new name in `names` (old -> new). where: for messages.

    Raises TensorMismatch if two tensors would get the same name: neither is dropped.
    """
    found: dict[str, LazyTensor] = {}
    taken: dict[str, str] = {}
    for old, new in names.items():
        if new in found:
            both = " and ".join(sorted([taken[new], old]))
            raise TensorMismatch(
                f"{where}: holds both {both}, two names of one tensor; remove the one that is wrong"
            )
        found[new], taken[new] = tensors[old], old
    return found


def whole_model(
    family: Family,
    config: ModelConfig,
    naming: Naming,
    found: Mapping[str, LazyTensor],
    where: str,
    slots: Mapping[str, Mapping[str, LazyTensor]] = MappingProxyType({}),
    *,
    has_zero_biases: bool = False,
) -> tuple[ModelConfig, dict[Key, LazyTensor]]:
    """The canonical tensors of an unsharded model, and its configuration, completed from the tensors.

    where: for messages. slots: the optimizer's tensors by slot and native name, for the parameters that have any; each
    comes after its weight. has_zero_biases: see `zero_biases.py`.
    Raises TensorMismatch for tensors that are missing, unknown or of the wrong shape.
    """
    left_out = {**family.left_out, **family.unused(config)}
    _warn_of_left_out(left_out, found, where)
    kept = _without(found, (*family.ignored, *left_out))
    config = _with_own_names(config, kept, where)
    require_scores_of_class(config, kept, where)
    config = with_stored_bias(family.complete(config, kept), kept)
    spellings = hf_namings(kept) if naming == HF else (naming,)
    if set(spellings) <= {HF, HF_SEPARATE} and not _holds_stacked(family):
        _require_experts(config, len(kept), where)
    spelling, natives = _best_spelling(family, config, spellings, kept)
    if config.whole is not None:
        whole = replace(config.whole, experts=spelling.variants)
        config = replace(config, whole=whole)
    if not slots:
        kept, natives = _by_first_names(kept, natives)
    if has_zero_biases:
        kept = without_zero_biases(kept, (native.name for native in natives), where)
    same_names([native.name for native in natives], kept, where)
    shapes = canonical_shapes(family.rows, config)
    tensors: dict[Key, LazyTensor] = {}
    for slot, held in {WEIGHT: kept, **slots}.items():
        stored = [native for native in natives if native.name in held]
        placed = [Placed(native, held[native.name], where) for native in stored]
        tensors |= assemble(shapes, placed, strict=True, slot=slot)
    if not slots:
        return config, tensors
    order = (Key(name, slot) for name in shapes for slot in (WEIGHT, *slots))
    in_order = {key: tensors[key] for key in order if key in tensors}
    return config, in_order


def _by_first_names(
    kept: Mapping[str, LazyTensor], natives: list[NativeTensor]
) -> tuple[dict[str, LazyTensor], list[NativeTensor]]:
    """(tensors, native tensors), if files hold a shared tensor under its second name alone.

    safetensors' save_model keeps the first name in alphabetical order: lm_head.weight of a tied head.
    """
    first = {tuple(native.parts): native.name for native in natives if native.copy is None}
    names = {
        native.name: first[tuple(native.parts)]
        for native in natives
        if native.copy is not None and first.get(tuple(native.parts), native.name) not in kept
    }
    by_first = {names.get(name, name): tensor for name, tensor in kept.items()}
    return by_first, [native for native in natives if native.name not in names]


def _with_own_names(
    config: ModelConfig, found: Mapping[str, LazyTensor], where: str
) -> ModelConfig:
    """The configuration; if no family describes the model, with the names and shapes of its tensors."""
    if config.own_names is None:
        return config
    if not found:
        raise TensorMismatch(f"{where}: holds no tensors; copy it again", code="missing-tensor")
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    return replace(config, own_names=config.own_names.with_tensors(shapes, where))


def _without(found: Mapping[str, LazyTensor], patterns: tuple[str, ...]) -> dict[str, LazyTensor]:
    """The tensors whose names match none of these regular expressions."""
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")
    return {name: tensor for name, tensor in found.items() if not ignored.fullmatch(name)}


def _best_spelling(
    family: Family,
    config: ModelConfig,
    spellings: tuple[Naming, ...],
    kept: Mapping[str, LazyTensor],
) -> tuple[Naming, list[NativeTensor]]:
    """The naming scheme that fits the tensors best, and the native tensors in it."""
    # With more layers than tensors, some layer must be missing: this bounds the work for an absurd configuration.
    most = len(kept) + 1
    bounded = changed(config, {"encoder.layers": min(config.encoder.layers, most)})
    whole = Chunk.of_whole_model(min(config.layer_count, most))
    listed = {each: _expected(family, bounded, each, whole, kept) for each in spellings}
    best = max(spellings, key=lambda each: _fitting(kept, listed[each]))
    return best, listed[best]


def hf_namings(names: Collection[str]) -> tuple[Naming, ...]:
    """The naming schemes that the tensors of a Hugging Face directory may have."""
    stacked = [name for name in names if name.endswith(_STACKED)]
    if not stacked and any(part in name for name in names for part in _SEPARATE):
        return (HF, HF_SEPARATE)
    if any(_FUSED in name for name in names):
        return (HF, HF_FUSED, HF_FUSED_HALVED)
    # The gate of a family with experts has this name in published files as well.
    is_of_class = any(_OF_CLASS in name for name in names) and not any(
        ".experts." in name for name in names
    )
    found: tuple[Naming, ...] = (HF, HF_STACKED) if is_of_class else (HF,)
    if stacked:
        found = (HF, HF_STACKED, HF_STACKED_TRANSPOSED)
    return (
        tuple(map(with_mtp_stacked, found))
        if any(name.startswith("mtp.") for name in stacked)
        else found
    )


def _warn_of_left_out(left_out: Mapping[str, str], found: Collection[str], where: str) -> None:
    for pattern, what in left_out.items():
        names = [name for name in found if re.fullmatch(pattern, name)]
        if names:
            _log.warning(
                "%s: %s are not converted, %s left out: %s; --base adds them to an hf output again",
                where,
                what,
                counted(len(names), "tensor"),
                listing(names),
            )


def _holds_stacked(family: Family) -> bool:
    """True if the family's usual files hold all experts of a layer in one tensor."""
    spelled = (spelling for row in family.rows if row.of_experts for spelling in row.spelling(HF))
    return any(spelling.holds_all_experts for spelling in spelled)


def _require_experts(config: ModelConfig, held: int, where: str) -> None:
    """Raises TensorMismatch if most of the experts must be missing. This check comes before their names are listed."""
    layers = len(config.layers_with("moe"))
    if layers * config.experts.count > 2 * held + 10_000:
        what = f"{held} tensors, the configuration has {config.experts.count:,} experts in each of {layers:,} layers"
        raise TensorMismatch(f"{where}: holds {what}; it is incomplete, or of another model")


def _expected(
    family: Family,
    config: ModelConfig,
    naming: Naming,
    whole: Chunk,
    found: Mapping[str, LazyTensor],
) -> list[NativeTensor]:
    natives = native_tensors(family.rows, config, naming, Layout(), 0, whole, config.vocab)
    return [native for native in natives if native.copy is None or native.name in found]


def _fitting(found: Mapping[str, LazyTensor], natives: list[NativeTensor]) -> int:
    """The number of native tensors that were found in their shape."""
    return sum(
        native.name in found and tuple(found[native.name].shape) == native.shape
        for native in natives
    )
