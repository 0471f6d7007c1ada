"""Reads the `quantization` of an MLX config.json, and takes the quantized weights of a model apart.

    {"group_size": 64, "bits": 4, "mode": "affine",                             the whole model
     "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},                  a module with settings of its own
     "model.embed_tokens": true,                                                a module with those of the whole model
     "lm_head": false}                                                          a module that isn't quantized

A quantized module has `weight`, `scales` and, for the mode `affine`, `biases`. Source: mlx-lm 0.32, load_model.
"""

import logging
from collections.abc import Mapping
from typing import Any, cast

from formats.tensor import LazyTensor, Shape
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.families.parts.hf_config import is_of_mlx
from megaconv.values.beside_weights import fitting, needed
from megaconv.values.mlx_groups import WORD_BITS, GroupedTensor, Grouping
from megaconv.values.settings import value_of

_log = logging.getLogger("megaconv")

KEYS = ("quantization", "quantization_config")
"""The keys of config.json under which mlx-lm writes the same description."""
AFFINE = "affine"
_SIZES = {AFFINE: (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
"""Mode -> the sizes of groups."""
_BITS = {AFFINE: (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_USUAL = {
    AFFINE: {"bits": 4, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32},
    "mxfp8": {"bits": 8, "group_size": 32},
    "nvfp4": {"bits": 4, "group_size": 16},
}
"""Mode -> MLX's values for missing keys of a module."""
FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes of weights, scales and biases."""
_SUPPORTED = (
    "affine with 1, 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4 and mxfp8 in groups of 32, and nvfp4 in groups "
    "of 16"
)
_SCALES, _BIASES, _GLOBAL_SCALE = ".scales", ".biases", ".global_scale"


def mlx_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """MLX's description in a config.json; None if the weights are plain. mlx-lm writes it under both keys."""
    for key in KEYS:
        given = config.get(key)
        if is_of_mlx(given):
            return cast("Mapping[str, Any]", given)
    return None


def grouping_of(settings: Mapping[str, Any], where: str) -> Grouping:
    """The form of a weight, or of the whole model. Raises CorruptCheckpoint, and UnsupportedInput for an unknown form."""
    mode = value_of({"mode": AFFINE, **settings}, "mode", str, where)
    complete = {**_USUAL.get(mode, {}), **settings}
    bits = value_of(complete, "bits", int, where)
    size = value_of(complete, "group_size", int, where)
    if mode not in _SIZES or size not in _SIZES[mode] or bits not in _BITS[mode]:
        found = f"mode {mode!r:.40} with {bits!r:.40} bits in groups of {size!r:.40}"
        raise UnsupportedInput(f"{where}: MLX's {found}; supported are {_SUPPORTED}")
    return Grouping(mode, bits, size)


def dequantized(
    tensors: Mapping[str, LazyTensor],
    settings: Mapping[str, Any] | None,
    dtype: str | None,
    where: str,
) -> dict[str, LazyTensor]:
    """The same tensors, with plain tensors in place of words, scales and biases.

    settings: MLX's description; None: no tensor may have scales. dtype: of dequantized tensors; None: that of the scales,
    or bfloat16 if the scales are codes. Raises TensorMismatch if a part is missing or doesn't fit.
    """
    found: dict[str, LazyTensor] = {}
    widths: set[int] = set()
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if f".{last}" in (_SCALES, _BIASES):
            needed(f"{module}.weight", tensors, where)
            needed(module + _SCALES, tensors, where)
            continue
        if f".{last}" == _GLOBAL_SCALE:
            raise UnsupportedInput(
                f"{where}: {name} scales a whole tensor, which isn't supported; quantize the model without --global-scale"
            )
        if last == "weight" and tensor.dtype == "uint32":
            needed(module + _SCALES, tensors, where)
        if last != "weight" or module + _SCALES not in tensors:
            found[name] = tensor
            continue
        grouping = _grouping_of_module(module, settings, where)
        widths.add(grouping.bits)
        found[name] = _plain(module, tensors, grouping, dtype, where)
    if widths:
        _log.warning(
            "%s: weights were rounded to %s bits before: they are not those of the original model",
            where,
            " or ".join(map(str, sorted(widths))),
        )
    return found


def _grouping_of_module(module: str, settings: Mapping[str, Any] | None, where: str) -> Grouping:
    if settings is None:
        raise TensorMismatch(
            f"{where}: {module} has scales, and config.json has no `{KEYS[0]}`; copy the model's own config.json"
        )
    own = settings.get(module, settings)
    if own is True:
        own = settings
    if not isinstance(own, Mapping):
        raise CorruptCheckpoint(
            f"{where}: {module} has scales, and config.json says {own!r:.40} for it"
        )
    return grouping_of(own, f"{where}: {KEYS[0]} of {module}")


def _plain(
    module: str,
    tensors: Mapping[str, LazyTensor],
    grouping: Grouping,
    dtype: str | None,
    where: str,
) -> GroupedTensor:
    words, scales = tensors[f"{module}.weight"], tensors[module + _SCALES]
    *rows, groups = grid = _grid(module, words, scales, grouping, where)
    shape = (*rows, groups * grouping.size)
    if grouping.mode != AFFINE:
        return GroupedTensor(words, scales, None, grouping, shape, dtype or "bfloat16")
    biases = fitting(module + _BIASES, tensors, grid, scales.dtype, where)
    return GroupedTensor(words, scales, biases, grouping, shape, dtype or scales.dtype)


def _grid(
    module: str, words: LazyTensor, scales: LazyTensor, grouping: Grouping, where: str
) -> Shape:
    """The shape of the scales of a weight. Raises TensorMismatch for words or scales that don't fit."""
    *rows, stored = words.shape or (0,)
    columns = stored * WORD_BITS // grouping.bits
    grid = (*rows, columns // grouping.size)
    is_whole = bool(rows) and columns % grouping.size == 0
    if words.dtype == "uint32" and is_whole and _has_scales(scales, grid, grouping):
        return grid
    found = f"{list(words.shape)} {words.dtype} with scales {list(scales.shape)} {scales.dtype}"
    numbers = "floats" if grouping.mode == AFFINE else "uint8"
    form = f"{grouping.bits} bits in groups of {grouping.size}"
    raise TensorMismatch(
        f"{where}: {module}.weight is {found}; expected uint32 with {list(grid)} {numbers}, by {form}",
        code="misshapen-tensor",
    )


def _has_scales(scales: LazyTensor, grid: Shape, grouping: Grouping) -> bool:
    """True for scales of this shape, and of a dtype that the mode has."""
    dtypes = FLOATS if grouping.mode == AFFINE else ("uint8",)
    return tuple(scales.shape) == grid and scales.dtype in dtypes
