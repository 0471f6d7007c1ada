"""Reads the weights of ModelOpt's unified checkpoints in FP8, INT8 and INT4 as plain weights.

    algorithm                    X.weight                    X.weight_scale
    FP8                          [out, in] float8_e4m3fn     []
    FP8_PER_CHANNEL_PER_TOKEN    [out, in] float8_e4m3fn     [out]
    W8A8_SQ_PER_CHANNEL          [out, in] int8              [out]
    W4A16_AWQ, W4A8_AWQ          [out / 2, in] uint8         [out, in / group]

An engine multiplies the inputs of a matrix with X.pre_quant_scale [in]. Here it multiplies the columns of the weight. A
byte of INT4 holds row 2i in its low four bits and row 2i + 1 in its high ones. W4A8_AWQ has a weight_scale_2 too, which
is no factor of the weight. Source: checkpoints of nvidia-modelopt 0.47.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from formats.tensor import LazyTensor, Shape, matrix_shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.values.scaled import NibbleRows, ScaledTensor

_log = logging.getLogger("megaconv")

_SCALE, _SCALE_2, _PRE_QUANT = "_scale", "_scale_2", "pre_quant_scale"
_OF_ACTIVATIONS = (
    ".activation_scale",
    *(
        f".{subject}_{kind}"
        for subject in ("input", "output", "q", "k", "v")
        for kind in ("scale", "global_scale", "zero_point")
    ),
)
"""Suffixes of tensors from a calibration: scales and zero points of activations and of the key/value cache."""
_FLOATS = ("float32", "bfloat16", "float16")
_QUANTIZED_DTYPES = ("float8_e4m3fn", "int8", "uint8")


@dataclass(frozen=True)
class PerTensor:
    """One scale for a whole matrix."""

    dtype: str
    scales: str = "one number"
    """The expected shape of the scales, for messages."""

    def codes(self, stored: LazyTensor) -> LazyTensor:
        """The codes as a tensor [out, in]."""
        return stored

    def grid(self, codes: Shape, scales: Shape) -> tuple[int, int] | None:
        """(blocks down, blocks across) of a matrix; None if the scales have another shape."""
        return (1, 1) if prod(scales) == 1 else None


@dataclass(frozen=True)
class PerRow:
    """A scale for each row."""

    dtype: str
    scales: str = "[out]"

    def codes(self, stored: LazyTensor) -> LazyTensor:
        return stored

    def grid(self, codes: Shape, scales: Shape) -> tuple[int, int] | None:
        rows = codes[0]
        return (rows, 1) if scales in ((rows,), (rows, 1)) else None


@dataclass(frozen=True)
class PerGroup:
    """Two codes of 4 bits per byte, and a scale for each group of consecutive elements of a row."""

    dtype: str = "uint8"
    scales: str = "[out, in / group]"

    def codes(self, stored: LazyTensor) -> LazyTensor:
        return NibbleRows(stored)

    def grid(self, codes: Shape, scales: Shape) -> tuple[int, int] | None:
        rows, cols = codes
        if len(scales) != 2 or scales[0] != rows or not scales[1]:
            return None
        across = scales[1]
        group, rest = divmod(cols, across)
        # Groups have a power of two, so another quotient means a shorter last group, which isn't supported.
        is_whole = not rest and (across == 1 or group.bit_count() == 1)
        return (rows, across) if is_whole else None


Form = PerTensor | PerRow | PerGroup

FORMS: Mapping[str, Form] = {
    "FP8": PerTensor("float8_e4m3fn"),
    "FP8_PER_CHANNEL_PER_TOKEN": PerRow("float8_e4m3fn"),
    "W8A8_SQ_PER_CHANNEL": PerRow("int8"),
    "W4A16_AWQ": PerGroup(),
    "W4A8_AWQ": PerGroup(),
}
"""ModelOpt's name of an algorithm (`quant_algo`) -> the form of its weights. `quantized.py` reads NVFP4."""


def form_of(settings: Any) -> Form | None:
    """The form of the weights that a quantization_config describes; None for another algorithm."""
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    return FORMS.get(algorithm) if isinstance(algorithm, str) else None


def dequantize(
    tensors: Mapping[str, LazyTensor], form: Form, dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises TensorMismatch if a scale is missing or doesn't fit.
    """
    left_out = set(scales_of_activations(tensors, where))
    found: dict[str, LazyTensor] = {}
    count = 0
    for name, tensor in tensors.items():
        if name in left_out or _is_scale(name, tensors):
            continue
        if tensor.dtype in _QUANTIZED_DTYPES or name + _SCALE in tensors:
            found[name] = _plain(name, tensors, form, dtype, where)
            count += 1
        else:
            found[name] = tensor
    if form.dtype != "float8_e4m3fn":
        _log.warning(
            "%s: %d weights were rounded to INT8 or INT4 before: they are not those of the original model",
            where,
            count,
        )
    return found


def scales_of_activations(names: Iterable[str], where: str) -> list[str]:
    """The names of the scales that belong to no weight. A warning counts them."""
    found = [name for name in names if name.endswith(_OF_ACTIVATIONS)]
    if found:
        _log.warning(
            "%s: %d scales of activations are left out: the weights are plain ones",
            where,
            len(found),
        )
    return found


def _is_scale(name: str, names: Container[str]) -> bool:
    module, _, last = name.rpartition(".")
    if last == _PRE_QUANT:
        return f"{module}.weight" in names
    weight = name.removesuffix(_SCALE_2).removesuffix(_SCALE)
    return weight != name and weight in names


def _plain(
    name: str, tensors: Mapping[str, LazyTensor], form: Form, dtype: str, where: str
) -> ScaledTensor:
    stored, scales = tensors[name], tensors.get(name + _SCALE)
    if scales is None:
        raise TensorMismatch(
            f"{where}: {name} is {stored.dtype}, and there is no {name}{_SCALE}",
            code="missing-tensor",
        )
    is_matrix = len(stored.shape) == 2
    codes = form.codes(stored) if is_matrix else stored
    grid = form.grid(codes.shape, tuple(scales.shape)) if is_matrix else None
    if grid is None or stored.dtype != form.dtype or scales.dtype not in _FLOATS:
        raise TensorMismatch(
            f"{where}: {name} is {list(stored.shape)} {stored.dtype} "
            f"with scales {list(scales.shape)} {scales.dtype}; "
            f"expected a matrix of {form.dtype} with {form.scales} float32",
            code="misshapen-tensor",
        )
    rows, cols = matrix_shape(codes.shape)
    block = rows // grid[0], cols // grid[1]
    of_columns = _of_columns(name, cols, tensors, where)
    return ScaledTensor(codes, reshaped(scales, grid), block, dtype, of_columns)


def _of_columns(
    name: str, cols: int, tensors: Mapping[str, LazyTensor], where: str
) -> LazyTensor | None:
    """A weight's pre_quant_scale as a tensor [1, in]; None if it has none."""
    scale_name = f"{name.rpartition('.')[0]}.{_PRE_QUANT}"
    factors = tensors.get(scale_name)
    if factors is None:
        return None
    if tuple(factors.shape) != (cols,) or factors.dtype not in _FLOATS:
        raise TensorMismatch(
            f"{where}: {scale_name} is {list(factors.shape)} {factors.dtype}; expected [{cols}] bfloat16",
            code="misshapen-tensor",
        )
    return reshaped(factors, (1, cols))
