"""Reads bitsandbytes' checkpoints of 4 and 8 bits (NF4, FP4, LLM.int8) as plain weights.

    4 bits          X.weight [elements / 2, 1] uint8: two numbers in each byte, the high four bits first. The same
                    bytes may be stored as another dtype (bnb_4bit_quant_storage), such as [elements / 4, 1] bfloat16
                    X.weight.quant_map [16] float32: the value of each number
                    X.weight.absmax [blocks] float32: the scale of each block of elements
                    X.weight.quant_state.bitsandbytes__nf4 (or __fp4) uint8: JSON with shape, blocksize and others
    nested scales   X.weight.absmax [blocks] uint8, X.weight.nested_quant_map [256] float32 and
                    X.weight.nested_absmax float32: scale = value of the byte * scale of its nested block + nested_offset
    8 bits          X.weight [out, in] int8, X.SCB [out] float32: number * SCB / 127; X.weight_format 0: rows in order

Products are computed in float32, as there, and then rounded to nearest even. Source: bitsandbytes 0.50.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape, read_tensor
from megaconv.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.model.check import well_formed
from megaconv.values.beside_weights import fitting, needed
from megaconv.values.rounding import rounded
from megaconv.values.scaled import read_bytes, read_floats
from megaconv.values.settings import value_of

_log = logging.getLogger("megaconv")

_WEIGHT, _ROW_SCALES, _ROW_FORMAT = ".weight", ".SCB", ".weight_format"
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_MAP, _SCALES = ".quant_map", ".absmax"
_NESTED_MAP, _NESTED_SCALES = ".nested_quant_map", ".nested_absmax"
_STATE_BYTES = 1 << 16
"""Most bytes of a weight's JSON. Those of bitsandbytes have some hundred."""
_INVERSE_OF_127 = 7.874015748031496e-3


def dequantize(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises TensorMismatch if a part is missing or doesn't fit, UnsupportedInput for rows in another order.
    """
    beside = {name for weight in tensors for name in _parts_of(weight, tensors)}
    quantized = [name for name in tensors if _is_quantized(name, tensors)]
    found = {name: tensor for name, tensor in tensors.items() if name not in beside}
    for name in found:
        module, state, _ = name.rpartition(".quant_state.")
        if state:
            needed(module, tensors, where)
    for name in quantized:
        is_wide = tensors[name].dtype == "int8" and not _has_state(name, tensors)
        found[name] = (_from_8_bits if is_wide else _from_4_bits)(name, tensors, dtype, where)
    _log.warning(
        "%s: %d weights were rounded to 4 or 8 bits before: they are not those of the original model",
        where,
        len(quantized),
    )
    return found


@dataclass(frozen=True)
class NestedScales:
    """Scales of blocks that are bytes themselves, in larger blocks."""

    codes: LazyTensor
    """[blocks] uint8."""
    values: LazyTensor
    """[256] float32: the value of each byte."""
    scales: LazyTensor
    """[nested blocks] float32."""
    block: int
    offset: float

    def between(self, first: int, last: int) -> Floats:
        """The scales of blocks: float32 [last - first]."""
        codes = read_bytes(self.codes, Box(first, last, 0, 1)).reshape(-1)
        nested = np.arange(first, last) // self.block
        scales = _floats(self.scales, int(nested[0]), int(nested[-1]) + 1)
        found: Floats = self._values[codes] * scales[nested - nested[0]]
        found += np.float32(self.offset)
        return found

    @cached_property
    def _values(self) -> Floats:
        return _floats(self.values, 0, 256)


@dataclass(frozen=True)
class PlainScales:
    """Scales of blocks, [blocks] float32."""

    scales: LazyTensor

    def between(self, first: int, last: int) -> Floats:
        """The scales of blocks: float32 [last - first]."""
        return _floats(self.scales, first, last)


@dataclass(frozen=True)
class FourBitTensor:
    """A tensor whose elements are numbers of 4 bits, in blocks of neighbors with a scale each."""

    packed: LazyTensor
    """[elements / 2 / itemsize, 1] of any dtype."""
    values: LazyTensor
    """[16] float32: the value of each number."""
    scales: NestedScales | PlainScales
    block: int
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        _, cols = matrix_shape(self.shape)
        if box.rows == 1:
            start = box.row0 * cols + box.col0
            values = self._between(start, start + box.cols).reshape(1, -1)
        else:
            whole_rows = self._between(box.row0 * cols, box.row1 * cols).reshape(-1, cols)
            values = np.ascontiguousarray(whole_rows[:, box.col0 : box.col1])
        np.copyto(out, rounded(values, self.dtype))

    def _between(self, start: int, end: int) -> Floats:
        """The elements from start to end, in the order of the file: float32 [end - start]."""
        codes = self._codes_between(start, end)
        values: Floats = self._values[codes]
        block_of = np.arange(start, end) // self.block
        first_block, last_block = int(block_of[0]), int(block_of[-1])
        scales = self.scales.between(first_block, last_block + 1)
        values *= scales[block_of - first_block]
        return values

    def _codes_between(self, start: int, end: int) -> Bytes:
        """The codes from start to end: uint8 [end - start], each below 16.

        A byte holds two codes, the high four bits first. A stored element may have several bytes.
        """
        size = ITEMSIZE[self.packed.dtype]
        codes_of_element = 2 * size
        first = start // codes_of_element
        after = -(-end // codes_of_element)
        pairs = read_bytes(self.packed, Box(first, after, 0, 1), size).reshape(-1)
        codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)
        skipped = start - first * codes_of_element
        found: Bytes = codes[skipped : skipped + end - start]
        return found

    @cached_property
    def _values(self) -> Floats:
        return _floats(self.values, 0, 16)


@dataclass(frozen=True)
class RowScaledTensor:
    """A matrix of int8 numbers with a scale for each row."""

    numbers: LazyTensor
    scales: LazyTensor
    """[rows] float32."""
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.numbers.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        values = read_floats(self.numbers, box)
        values *= _floats(self.scales, box.row0, box.row1)[:, None]
        values *= _INVERSE_OF_127
        np.copyto(out, rounded(values, self.dtype))


def _floats(tensor: LazyTensor, first: int, last: int) -> Floats:
    """Elements of a vector: float32 [last - first]."""
    return read_floats(tensor, Box(first, last, 0, 1)).reshape(-1)


def _is_quantized(name: str, tensors: Mapping[str, LazyTensor]) -> bool:
    is_integer = tensors[name].dtype in ("uint8", "int8")
    return _has_state(name, tensors) or (name.endswith(_WEIGHT) and is_integer)


def _has_state(name: str, tensors: Mapping[str, LazyTensor]) -> bool:
    return any(name + end in tensors for end in _STATES)


def _parts_of(name: str, tensors: Mapping[str, LazyTensor]) -> list[str]:
    """The names of the tensors that only a quantized weight needs."""
    if not _is_quantized(name, tensors):
        return []
    of_weight = (*_STATES, _MAP, _SCALES, _NESTED_MAP, _NESTED_SCALES)
    of_module = (_ROW_SCALES, _ROW_FORMAT)
    module = name.removesuffix(_WEIGHT)
    return [name + part for part in of_weight] + [module + part for part in of_module]


@dataclass(frozen=True)
class _State:
    """The JSON beside a weight of 4 bits."""

    shape: Shape
    block: int
    """Elements with one scale."""
    nested_block: int
    """Scales with one scale; 0 if scales are stored as they are."""
    offset: float
    """The number that is added to nested scales."""

    @classmethod
    def read(cls, name: str, tensor: LazyTensor, where: str) -> "_State":
        """Raises CorruptCheckpoint for anything but such a JSON."""
        path = f"{where}: {name}"
        stated = _json_in(tensor, path)
        shape = value_of(stated, "shape", list, path)
        block = value_of(stated, "blocksize", int, path)
        with well_formed(path):
            state = cls(
                shape=tuple(int(size) for size in shape),
                block=block,
                nested_block=int(stated.get("nested_blocksize", 0)),
                offset=float(stated.get("nested_offset", 0.0)),
            )
        if min(state.shape, default=0) < 1 or block < 1 or state.nested_block < 0:
            raise CorruptCheckpoint(f"{path}: there is no weight of {shape} in blocks of {block}")
        return state


def _json_in(tensor: LazyTensor, path: str) -> dict[str, Any]:
    """The object whose text is the tensor's bytes. path: its place, for messages."""
    if tensor.dtype != "uint8" or prod(tensor.shape) > _STATE_BYTES:
        raise CorruptCheckpoint(
            f"{path}: is {list(tensor.shape)} {tensor.dtype}; expected the bytes of a short JSON"
        )
    with well_formed(path):
        return dict(json.loads(read_tensor(tensor).tobytes()))


def _from_4_bits(
    name: str, tensors: Mapping[str, LazyTensor], dtype: str, where: str
) -> FourBitTensor:
    named = next((name + end for end in _STATES if name + end in tensors), name + _STATES[0])
    state = _State.read(named, needed(named, tensors, where), where)
    count = prod(state.shape)
    blocks = -(-count // state.block)

    def part(end: str, shape: Shape, kind: str) -> LazyTensor:
        return fitting(name + end, tensors, shape, kind, where)

    stored_as = tensors[name].dtype
    bytes_of_element = ITEMSIZE[stored_as]
    packed = part("", (-(-count // (2 * bytes_of_element)), 1), stored_as)
    values = part(_MAP, (16,), "float32")
    scales: NestedScales | PlainScales
    if state.nested_block:
        scales = NestedScales(
            codes=part(_SCALES, (blocks,), "uint8"),
            values=part(_NESTED_MAP, (256,), "float32"),
            scales=part(_NESTED_SCALES, (-(-blocks // state.nested_block),), "float32"),
            block=state.nested_block,
            offset=state.offset,
        )
    else:
        scales = PlainScales(part(_SCALES, (blocks,), "float32"))
    return FourBitTensor(packed, values, scales, state.block, state.shape, dtype)


def _from_8_bits(
    name: str, tensors: Mapping[str, LazyTensor], dtype: str, where: str
) -> RowScaledTensor:
    module, numbers = name.removesuffix(_WEIGHT), tensors[name]
    rows, _ = matrix_shape(numbers.shape)
    scales = fitting(module + _ROW_SCALES, tensors, (rows,), "float32", where)
    order = tensors.get(module + _ROW_FORMAT)
    if order is not None and read_tensor(order).any():
        raise UnsupportedInput(
            f"{where}: {module}{_ROW_FORMAT} isn't 0: the rows of {name} are in another order"
        )
    return RowScaledTensor(numbers, scales, dtype)
