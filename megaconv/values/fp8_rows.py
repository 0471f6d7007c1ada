"""Quantizes weights to FP8 by rows as ModelOpt's FP8_PER_CHANNEL_PER_TOKEN: float8_e4m3fn, with a float32 scale per row.

    scale = max |x| / 448 of the row in float32, 1 for one of zeros;  q = x / scale, to nearest even;  read as q * scale

A tensor is read twice: for its scales, then for its values. `modelopt.py` is the inverse. INT8 has the same scales, with
127 in place of 448 (`calibrated.py`).
"""

from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import AT_ONCE, Unread
from megaconv.values.fp8_blocks import LARGEST
from megaconv.values.scaled import read_floats

SCALES = "_scale"
"""The suffix of the scales' name after the weight's name."""


@dataclass(frozen=True)
class Rows:
    """A matrix to be quantized, with the scales of its rows."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""
    largest_code: float = LARGEST
    format_name: str = "FP8 by rows"
    """For messages."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def read(self, box: Box) -> Floats:
        return read_floats(self.source, box)

    @property
    def scales(self) -> Floats:
        """The scales [rows]. Raises NotExpressible for a value that isn't finite."""
        with self._lock:
            return self._scales

    @cached_property
    def _scales(self) -> Floats:
        rows, cols = matrix_shape(self.source.shape)
        largest = np.zeros(rows, np.float32)
        step = AT_ONCE * ITEMSIZE[self.source.dtype]
        for box in box_blocks(Box(0, rows, 0, cols), self.source.dtype, step):
            found = np.abs(self.read(box)).max(axis=1)
            of_rows = largest[box.row0 : box.row1]
            np.maximum(of_rows, found, out=of_rows)  # keeps NaN
        if not np.isfinite(largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, which {self.format_name} can't express"
            )
        scales = largest / np.float32(self.largest_code)
        return np.where(scales == 0, np.float32(1), scales)

    def scales_of(self, box: Box) -> Floats:
        """The scales of a rectangle's rows: [rows, 1]."""
        return self.scales[box.row0 : box.row1, None]


@dataclass(frozen=True)
class RowScales(Unread):
    """The scales of a matrix, as a tensor [rows]."""

    rows: Rows
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return scales_shape(self.rows.source.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        part = np.ascontiguousarray(self.rows.scales_of(box))
        np.copyto(out, part.view(np.uint8))


def scales_shape(shape: Shape) -> Shape:
    rows, _ = matrix_shape(shape)
    return (rows,)
