"""The arithmetic of LoRA: the delta of a pair of matrices and its addition to a weight, bit for bit as peft on a CPU.

    delta               (B @ A) * scale, in float32, also of an adapter in 16 bits: peft loads its matrices as float32
    Linear, Conv1D      weight + delta, rounded once
    embedding, experts  the delta is rounded to the weight's dtype first, then added; with MiCA, everywhere
    DoRA                magnitude / |weight + delta| * (weight + delta), the norm of each row, rounded once

The sums of the product run over the rank in order, with one fused multiply-add per step. torch computes this way.
BLAS libraries compute matrices of two rows this way, but not vectors. Therefore no vector is multiplied here, and an
element has the same bits in whichever rectangle it is computed. With a BLAS that sums in another order, the last bit of
float32 may differ from peft's.

Nothing is cached between two rectangles: an adapter's rows and columns are read again for each.
"""

from dataclasses import dataclass
from typing import Any

from formats.lazy_numpy import Floats, np
from formats.tensor import (
    ITEMSIZE,
    Box,
    Bytes,
    ComputedTensor,
    LazyTensor,
    Shape,
    box_blocks,
    matrix_shape,
)
from megaconv.errors import NotExpressible
from megaconv.model.assembled import window
from megaconv.values import rounding

FLOATS = ("float32", "float16", "bfloat16")
_BLOCK_BYTES = 4 << 20
"""Bytes of the float32 numbers that are computed at a time."""
_LANES = 8
"""Number of parallel sums in torch's norm of a float32 row."""
_LEAST_NORM = 1e-15
"""Least divisor of DoRA, as in the trainer: a row of zeros, such as that of a removed neuron, stays one. peft makes NaN of it."""


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
    """left @ right. No factor is a vector, so that BLAS sums every element in the same order.

    OpenBLAS sums in another order from rank 8 on, in its functions for four rows and more. So each call has two rows.
    """
    rows, cols = len(left), right.shape[1]
    if rows % 2:
        left = np.concatenate([left, left[-1:]])
    if cols == 1:
        right = np.repeat(right, 2, axis=1)
    pairs = left.reshape(-1, 2, left.shape[1])
    found: Floats = np.matmul(pairs, right).reshape(len(left), -1)[:rows, :cols]
    return found


@dataclass(frozen=True)
class Delta:
    """(B @ A) * scale as a native tensor: of one matrix, or of all experts' [experts, rows, cols]."""

    a: LazyTensor
    """The matrix A: [experts * r, in]."""
    b: LazyTensor
    """The matrix B: [out, r * experts]; an expert has every experts-th column."""
    scale: float
    shape: Shape
    flipped: bool
    """True if the model stores the weight as [in, out]."""
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
        return found.T if self.flipped else found


@dataclass(frozen=True)
class ScaledVector:
    """A vector times a number: the change of a bias by lora_B.bias."""

    source: LazyTensor
    scale: float
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        found = read_floats(self.source, box) * np.float32(self.scale)
        np.copyto(out, np.ascontiguousarray(found).view(np.uint8))


@dataclass(frozen=True)
class Spread:
    """A number per output of a weight, repeated for each element, so that it is sharded and fused like the weight."""

    numbers: LazyTensor
    """The numbers: [out]."""
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
    """The change of one canonical tensor [out, in] by an adapter.

    Its lazy tensors are float32 in the tensor's shape.
    """

    delta: LazyTensor
    rounds_first: bool = False
    magnitude: LazyTensor | None = None
    """For DoRA: the required norm of each row."""
    flipped: bool = False
    """True if the model stores the weight as [in, out]."""


@dataclass(frozen=True)
class MergedTensor(ComputedTensor):
    """A canonical tensor with a change merged into it, in its own dtype.

    A read raises NotExpressible if a finite number would become infinite or NaN.
    """

    change: Change
    name: str
    """The tensor's name for messages."""
    overflow: bool = False
    """True to accept infinite numbers, but not NaN."""

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise NotExpressible(
                f"{self.name}: is {self.dtype}; adapters are merged into {', '.join(FLOATS)}"
            )

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        computed, block_bytes = box, _BLOCK_BYTES
        if self.change.magnitude is not None:
            # The norm of a row needs the whole row.
            _, cols = matrix_shape(self.shape)
            computed = box._replace(col0=0, col1=cols)
            block_bytes = _rows_of(computed)
        for part in box_blocks(computed, "float32", block_bytes):
            wanted = part._replace(
                col0=max(part.col0, box.col0),
                col1=min(part.col1, box.col1),
            )
            values = self._merged(part)
            kept = values[:, wanted.col0 - part.col0 : wanted.col1 - part.col0]
            np.copyto(window(out, box, wanted, itemsize), self._rounded(kept))

    def _rounded(self, values: Floats) -> Bytes:
        """The bytes of merged numbers in the tensor's dtype."""
        try:
            return rounding.rounded(
                np.ascontiguousarray(values), self.dtype, overflow=self.overflow
            )
        except rounding.BeyondRange:
            raise self._not_finite() from None

    def _merged(self, box: Box) -> Floats:
        weight, delta = read_floats(self.source, box), read_floats(self.change.delta, box)
        if self.change.rounds_first:
            delta = _as_floats(rounding.rounded(delta, self.dtype), self.dtype)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            weight += delta
            if self.change.magnitude is not None:
                length = read_floats(self.change.magnitude, box._replace(col1=box.col0 + 1))[:, 0]
                norms = np.maximum(row_norms(weight, self._lanes), _LEAST_NORM)
                weight *= (length / norms)[:, None]
        if not np.isfinite(weight).all():
            self._require_earlier(weight, box)
        return weight

    @property
    def _lanes(self) -> int:
        """The number of parallel sums in the norm of a row. torch sums a column in order."""
        return 1 if self.change.flipped else _LANES

    def _require_earlier(self, merged: Floats, box: Box) -> None:
        """Raise NotExpressible unless all numbers that aren't finite were so before."""
        wrong = np.isnan(merged) if self.overflow else ~np.isfinite(merged)
        if np.any(wrong & np.isfinite(read_floats(self.source, box))):
            raise self._not_finite()

    def _not_finite(self) -> NotExpressible:
        return NotExpressible(
            f"{self.name}: merging an adapter makes finite weights infinite in {self.dtype}, or NaN; look for NaN and large "
            "numbers in the adapter (`megaconv inspect ADAPTER --stats`), or give --dtype float32"
        )


def _rows_of(box: Box) -> int:
    """Bytes of a block that holds at least one whole row."""
    return max(_BLOCK_BYTES, box.cols * ITEMSIZE["float32"])


def row_norms(values: Floats, lanes: int) -> Any:
    """The norm of each row, as torch sums its squares: so many parallel sums, which are then added in order."""
    whole = values.shape[1] // lanes * lanes
    squares = values * values
    sums = np.zeros((len(values), lanes), np.float32)
    for col in range(0, whole, lanes):
        sums += squares[:, col : col + lanes]
    total = np.zeros(len(values), np.float32)
    for column in (*sums.T, *squares[:, whole:].T):
        total += column
    return np.sqrt(total)
