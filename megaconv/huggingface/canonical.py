"""The canonical tensors of a whole model, from tensors that have their native names."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from formats.tensor import LazyTensor
from formats.wording import counted, listing
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.families.parts.scores import require_scores_of_class, with_stored_bias
from megaconv.huggingface.spellings import hf_namings
from megaconv.huggingface.zero_biases import without_zero_biases
from megaconv.model.assembled import Placed, assemble
from megaconv.model.check import same_names
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF, HF_SEPARATE, HF_STACKED, Naming
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.table import canonical_shapes

_log = logging.getLogger("megaconv")


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
    if set(spellings) <= {HF, HF_SEPARATE, HF_STACKED} and not _holds_stacked(family):
        _require_experts(config, len(kept), where)
    spelling, natives = _best_spelling(family, config, spellings, kept)
    if config.whole is not None:
        config = replace(config, whole=replace(config.whole, experts=spelling.variants))
    if not slots:
        kept, natives = _by_first_names(kept, natives)
    if has_zero_biases:
        kept = without_zero_biases(kept, (native.name for native in natives), where)
    same_names([native.name for native in natives], kept, where)
    return config, _assembled(family, config, natives, {WEIGHT: kept, **slots}, where)


def _assembled(
    family: Family,
    config: ModelConfig,
    natives: Collection[NativeTensor],
    slots: Mapping[str, Mapping[str, LazyTensor]],
    where: str,
) -> dict[Key, LazyTensor]:
    """The canonical tensors of all slots, in the order of the family's table; a parameter's slots follow each other."""
    shapes = canonical_shapes(family.rows, config)
    tensors: dict[Key, LazyTensor] = {}
    for slot, held in slots.items():
        stored = [native for native in natives if native.name in held]
        placed = [Placed(native, held[native.name], where) for native in stored]
        tensors |= assemble(shapes, placed, strict=True, slot=slot)
    if len(slots) == 1:
        return tensors
    order = (Key(name, slot) for name in shapes for slot in slots)
    return {key: tensors[key] for key in order if key in tensors}


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
