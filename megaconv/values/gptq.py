"""Reads GPTQ's and AWQ's checkpoints as plain weights.

    GPTQ    X.qweight [in / 8, out] int32 (of 8 bits: [in / 4, out]), a word holds numbers of one column,
            X.qzeros [groups, out / 8] int32, X.scales [groups, out], X.g_idx [in] int32: the group of each input
    AWQ     X.qweight [in, out / 8] int32, a word holds numbers of one row in the order 0 2 4 6 1 3 5 7,
            X.qzeros [groups, out / 8] in the same order, X.scales [groups, out]

    X.weight [out, in] = (number - zero point of its group) * scale of its group

GPTQ's older format (`gptq`, the usual one) stores zero points less 1, and `gptq_v2` stores them as they are. Without a
g_idx, neighboring inputs are a group. `packed_words.py` describes the words. Products are computed in float32 and then
rounded to nearest even. Sources: GPTQModel 7.7, AutoAWQ 0.2.9.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, read_tensor
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.values.beside_weights import fitting, needed, require_one_form
from megaconv.values.packed_words import ColumnWords, RowWords
from megaconv.values.rounding import rounded
from megaconv.values.scaled import read_floats
from megaconv.values.settings import value_of

_log = logging.getLogger("megaconv")

_WORDS, _ZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
_FLOATS = ("float16", "bfloat16", "float32")
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_BITS = {"gptq": (4, 8), "awq": (4,)}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of AWQ's first number, second number, and so on."""


@dataclass(frozen=True)
class Settings:
    """The form in which the matrices of a checkpoint are stored."""

    method: str
    layout: str
    bits: int
    group: int
    """Neighboring inputs that share a scale, if no g_idx says otherwise; -1: all inputs."""
    needs_index: bool
    """True if inputs of a group aren't neighbors, so that each matrix needs a g_idx."""

    @property
    def per_word(self) -> int:
        """The numbers that a word holds."""
        return 32 // self.bits


def settings_of(method: str, given: Any, where: str) -> Settings:
    """The settings of a quantization_config. Raises UnsupportedInput for another layout or other widths."""
    inside = f"{where}: quantization_config"
    bits = value_of(given, "bits", int, inside)
    group = value_of(given, "group_size", int, inside)
    layout = _layout(method, given, inside)
    _require_plain_product(given, where)
    if layout not in _FORMATS[method] or bits not in _BITS[method]:
        raise UnsupportedInput(
            f"{where}: weights quantized by {method} in the layout {layout:.40} with {bits} bits; supported are "
            f"{' and '.join(_FORMATS[method])} with {' or '.join(map(str, _BITS[method]))} bits"
        )
    needs_index = method == "gptq" and bool(given.get("desc_act")) and group != -1
    return Settings(method, layout, bits, group, needs_index)


def _layout(method: str, given: Mapping[str, Any], inside: str) -> str:
    """The layout of the words, by the key of the method or by `format`, as transformers 5 calls it.

    Raises CorruptCheckpoint if both keys are there and differ. transformers then takes one, and GPTQModel the other.
    """
    if given.get("backend") == "llm-awq":
        return "llm-awq"
    key = "checkpoint_format" if method == "gptq" else "version"
    stated = {each: str(given[each]).lower() for each in (key, "format") if given.get(each)}
    if len(set(stated.values())) > 1:
        found = " and ".join(f"{each} {layout:.40}" for each, layout in stated.items())
        raise CorruptCheckpoint(f"{inside}: names two layouts: {found}; remove the wrong one")
    return next(iter(stated.values()), _FORMATS[method][0])


def _require_plain_product(given: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedInput if a layer computes more than a product with its weight."""
    if given.get("rotation"):
        raise UnsupportedInput(
            f"{where}: weights quantized by GPTQModel with rotation {given['rotation']!r:.40}: a layer turns its "
            "inputs before it multiplies them, which plain weights can't say; convert an unquantized copy of the model"
        )


def dequantize(
    tensors: Mapping[str, LazyTensor], settings: Settings, dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of words, zero points and scales.

    Raises TensorMismatch if a part is missing or doesn't fit.
    """
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == "qweight":
            require_one_form(f"{module}.weight", name, tensors, where)
            found[f"{module}.weight"] = _plain(module, tensors, settings, dtype, where)
        elif f".{last}" in (_ZEROS, _GROUPS):
            needed(module + _WORDS, tensors, where)
        elif last != "scales" or module + _WORDS not in tensors:
            found[name] = tensor
    _log.warning(
        "%s: %d weights were rounded to %d bits before: they are not those of the original model",
        where,
        sum(name.endswith(_WORDS) for name in tensors),
        settings.bits,
    )
    return found


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix [out, in] of integers that are stored as [in, out], in groups of inputs with a scale each."""

    numbers: LazyTensor
    """[in, out] int8."""
    zero_points: LazyTensor
    """[groups, out] int8."""
    scales: LazyTensor
    """[groups, out]."""
    group: int
    """Neighboring inputs of a group."""
    group_of_input: LazyTensor | None
    """[in] int32: the group of each input; None: as `group` says."""
    dtype: str
    where: str
    """Name for messages."""

    @property
    def shape(self) -> Shape:
        inputs, outputs = matrix_shape(self.numbers.shape)
        return outputs, inputs

    def read_into(self, box: Box, out: Bytes) -> None:
        groups = self._groups[box.col0 : box.col1]
        first, last = int(groups.min()), int(groups.max()) + 1
        of_groups = Box(first, last, box.row0, box.row1)
        numbers = read_floats(self.numbers, Box(box.col0, box.col1, box.row0, box.row1))
        zero_points = read_floats(self.zero_points, of_groups)
        scales = read_floats(self.scales, of_groups)
        numbers -= zero_points[groups - first]
        numbers *= scales[groups - first]
        np.copyto(out, rounded(np.ascontiguousarray(numbers.T), self.dtype))

    @cached_property
    def _groups(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The group of each input. Raises TensorMismatch for a group that has no scales."""
        inputs, count = self.numbers.shape[0], self.scales.shape[0]
        if self.group_of_input is None:
            return np.arange(inputs) // self.group
        found = read_tensor(self.group_of_input).reshape(-1).view(np.int32).astype(np.int64)
        if found.min() < 0 or found.max() >= count:
            raise TensorMismatch(
                f"{self.where}: names group {found.max()}, and there are scales of {count} groups",
                code="misshapen-tensor",
            )
        return found


def _plain(
    module: str, tensors: Mapping[str, LazyTensor], settings: Settings, dtype: str, where: str
) -> GroupedMatrix:
    words = needed(module + _WORDS, tensors, where)
    scales = needed(module + _SCALES, tensors, where)
    numbers = _numbers(words, settings)
    inputs, outputs = matrix_shape(numbers.shape)
    count, _ = matrix_shape(scales.shape)
    is_scaled = scales.dtype in _FLOATS and tuple(scales.shape) == (count, outputs)
    if words.dtype != "int32" or len(words.shape) != 2 or not is_scaled:
        raise TensorMismatch(
            f"{where}: {module}{_WORDS} is {list(words.shape)} {words.dtype} with scales {list(scales.shape)} {scales.dtype}; "
            f"expected int32 with floats [groups, {outputs}]",
            code="misshapen-tensor",
        )
    zero_words = -(-outputs // settings.per_word)
    zeros = fitting(module + _ZEROS, tensors, (count, zero_words), "int32", where)
    group = inputs if settings.group == -1 else settings.group
    index = module + _GROUPS
    groups = None
    if settings.needs_index or (settings.method == "gptq" and index in tensors):
        groups = fitting(index, tensors, (inputs,), "int32", where)
    elif group < 1 or count != -(-inputs // group):
        raise TensorMismatch(
            f"{where}: {module}{_SCALES} has scales of {count} groups for {inputs} inputs in groups of {group}",
            code="misshapen-tensor",
        )
    return GroupedMatrix(
        numbers,
        _zero_points(zeros, (count, outputs), settings),
        scales,
        group,
        groups,
        dtype,
        f"{where}: {index}",
    )


def _numbers(words: LazyTensor, settings: Settings) -> RowWords | ColumnWords:
    """The numbers [in, out] of a matrix."""
    rows, cols = matrix_shape(words.shape)
    per_word = settings.per_word
    if settings.method == "awq":
        return RowWords(words, (rows, per_word * cols), settings.bits, order=_AWQ_ORDER)
    return ColumnWords(words, (per_word * rows, cols), settings.bits)


def _zero_points(words: LazyTensor, shape: Shape, settings: Settings) -> RowWords:
    """The zero points [groups, out] of a matrix."""
    if settings.method == "awq":
        return RowWords(words, shape, settings.bits, order=_AWQ_ORDER)
    return RowWords(words, shape, settings.bits, adds_one=settings.layout == "gptq")
