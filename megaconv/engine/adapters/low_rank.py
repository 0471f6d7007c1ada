"""The arithmetic of LoRA: what a pair of matrices adds to a weight, and how it is added, bit for bit as peft does it on a CPU.

    delta               (B @ A) * scale, in float32; rounded to the adapter's dtype where that has 16 bits
    Linear, Conv1D      weight + delta, rounded once
    embedding, experts  the delta is rounded to the weight's dtype first, then added
    DoRA                magnitude / |weight + delta| * (weight + delta), the norm of each row, rounded once

The product's sums run over the rank in its order, one fused multiplication and addition a step: what BLAS libraries do for
matrices, but not for vectors, so that none is ever multiplied here. An element so has the same bits whichever rectangle it
is computed in. Where a BLAS takes another order, the last bit of float32 may differ from peft's.

Nothing is kept between two rectangles: an adapter's rows and columns are read again for each.
"""

from dataclasses import dataclass
from typing import Any

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.engine import rounding
from megaconv.errors import NotExpressible

FLOATS = ("float32", "float16", "bfloat16")
_BLOCK_BYTES = 4 << 20
"""Of the float32 numbers that are computed at a time."""
_LANES = 8
"""Sums that run side by side in torch's norm of a row of float32."""


def read_floats(tensor: LazyTensor, box: Box) -> Floats:
    """A rectangle as float32 [rows, cols]."""
    stored = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, stored)
    return _as_floats(stored, tensor.dtype)


def _as_floats(stored: Bytes, dtype: str) -> Floats:
    """Contiguous bytes [rows, bytes of a row] as float32."""
    numbers = rounding.exact(stored.reshape(-1), dtype)
    return np.asarray(numbers, np.float32).reshape(len(stored), -1)


def product(left: Floats, right: Floats) -> Floats:
    """left @ right, no element's sum in the order of a product of vectors."""
    rows, cols = len(left), right.shape[1]
    if rows == 1:
        left = np.repeat(left, 2, axis=0)
    if cols == 1:
        right = np.repeat(right, 2, axis=1)
    found: Floats = np.matmul(left, right)[:rows, :cols]
    return found


@dataclass(frozen=True)
class Delta:
    """(B @ A) * scale as a native tensor: of one matrix, or of all experts' [experts, rows, cols]."""

    a: LazyTensor
    """[experts * r, in]."""
    b: LazyTensor
    """[out, r * experts]: an expert has every experts-th column."""
    scale: float
    shape: Shape
    flipped: bool
    """Whether the model stores the weight as [in, out]."""
    experts: int = 1
    dtype: str = "float32"

    def read_into(self, box: Box, out: Bytes) -> None:
        rows = matrix_shape(self.shape)[0] // self.experts
        for expert in range(box.row0 // rows, -(-box.row1 // rows)):
            first, last = max(box.row0, expert * rows), min(box.row1, (expert + 1) * rows)
            wanted = Box(first - expert * rows, last - expert * rows, box.col0, box.col1)
            found = np.ascontiguousarray(self._of_expert(expert, wanted)).view(np.uint8)
            np.copyto(out[first - box.row0 : last - box.row0], found)

    def _of_expert(self, expert: int, box: Box) -> Floats:
        outs, ins = ((box.row0, box.row1), (box.col0, box.col1))[:: -1 if self.flipped else 1]
        rank = matrix_shape(self.a.shape)[0] // self.experts
        a = read_floats(self.a, Box(expert * rank, (expert + 1) * rank, *ins))
        b = read_floats(self.b, Box(*outs, 0, rank * self.experts))[:, expert :: self.experts]
        found = product(np.ascontiguousarray(b), a) * np.float32(self.scale)
        found = _as_floats(rounding.rounded(found, self.b.dtype), self.b.dtype)
        return found.T if self.flipped else found


@dataclass(frozen=True)
class ScaledVector:
    """A vector times a number, rounded to the vector's dtype: what lora_B.bias adds to a bias."""

    source: LazyTensor
    scale: float
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        found = read_floats(self.source, box) * np.float32(self.scale)
        np.copyto(out, _as_floats(rounding.rounded(found, self.source.dtype), self.source.dtype).view(np.uint8))


@dataclass(frozen=True)
class Spread:
    """A number for each output of a weight, at each of its elements: so that what cuts and joins weights fits it too."""

    numbers: LazyTensor
    """[out]."""
    shape: Shape
    flipped: bool
    dtype: str = "float32"

    def read_into(self, box: Box, out: Bytes) -> None:
        outs = (box.col0, box.col1) if self.flipped else (box.row0, box.row1)
        numbers = read_floats(self.numbers, Box(*outs, 0, 1))
        spread = np.broadcast_to(numbers.T if self.flipped else numbers, (box.rows, box.cols))
        np.copyto(out, np.ascontiguousarray(spread).view(np.uint8))


@dataclass(frozen=True)
class Change:
    """What an adapter does to one canonical tensor [out, in]; its lazy tensors have the tensor's shape, in float32."""

    delta: LazyTensor
    rounds_first: bool = False
    magnitude: LazyTensor | None = None
    """DoRA: the length that each row is to have."""


@dataclass(frozen=True)
class MergedTensor:
    """A canonical tensor with a change merged into it, in its own dtype."""

    source: LazyTensor
    change: Change
    name: str
    """For messages."""

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise NotExpressible(f"{self.name}: is {self.dtype}; adapters are merged into {', '.join(FLOATS)}")

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize, (_, cols) = ITEMSIZE[self.dtype], matrix_shape(self.shape)
        # The norm of a row needs all of it.
        whole = box if self.change.magnitude is None else box._replace(col0=0, col1=cols)
        for part in box_blocks(whole, "float32", _BLOCK_BYTES if self.change.magnitude is None else _rows_of(whole)):
            values = self._merged(part)
            first, last = max(part.col0, box.col0), min(part.col1, box.col1)
            kept = np.ascontiguousarray(values[:, first - part.col0 : last - part.col0])
            place = out[part.row0 - box.row0 : part.row1 - box.row0]
            np.copyto(
                place[:, (first - box.col0) * itemsize : (last - box.col0) * itemsize],
                rounding.rounded(kept, self.dtype),
            )

    def _merged(self, box: Box) -> Floats:
        weight, delta = read_floats(self.source, box), read_floats(self.change.delta, box)
        if self.change.rounds_first:
            delta = _as_floats(rounding.rounded(delta, self.dtype), self.dtype)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            weight += delta
            if self.change.magnitude is not None:
                length = read_floats(self.change.magnitude, box._replace(col1=box.col0 + 1))[:, 0]
                weight *= (length / row_norms(weight))[:, None]
        return weight


def _rows_of(box: Box) -> int:
    """Bytes of a block of whole rows, however long one is."""
    return max(_BLOCK_BYTES, box.cols * ITEMSIZE["float32"])


def row_norms(values: Floats) -> Any:
    """The length of each row, as torch adds its squares: eight sums side by side, which are added in their order."""
    whole = values.shape[1] // _LANES * _LANES
    squares = values * values
    sums = np.zeros((len(values), _LANES), np.float32)
    for col in range(0, whole, _LANES):
        sums += squares[:, col : col + _LANES]
    total = np.zeros(len(values), np.float32)
    for column in (*sums.T, *squares[:, whole:].T):
        total += column
    return np.sqrt(total)
