"""The form in which a saver stores one tensor, if other values are stored than the canonical ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from formats.tensor import Box, Bytes, Shape
from megaconv.options import QUANTIZATIONS
from megaconv.values.code_tensors import Unread

if TYPE_CHECKING:
    from formats.lazy_numpy import Floats

LEFT_OUT = "left out"
FOLDED = "folded"
PLUS_ONE = "plus one"
AFFINE = {f"affine-{bits}": bits for bits in (2, 3, 4, 5, 6, 8)}
"""MLX's quantizations to integers -> their bits."""
MLX_FLOATS = {f"mlx-{mode}": mode for mode in ("mxfp4", "mxfp8", "nvfp4")}
"""MLX's quantizations to floats -> their modes."""


@dataclass(frozen=True, eq=False)
class Constant(Unread):
    """A small tensor whose content is known before the conversion, such as a scale of activations."""

    content: "Bytes"
    """The tensor's bytes as a matrix [rows, columns * itemsize]."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = self.content.shape[1]
        out[:] = self.content[box.row0 : box.row1, :itemsize]


class Step(NamedTuple):
    """Factors [in] of the columns of a matrix, float32. The products are rounded to the dtype of the matrix."""

    times: "Floats"
    over: "Floats | None" = None
    """Divisors of the products; None: no divisors."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """The factors of a tensor that a calibration gives."""

    steps: tuple[Step, ...] = ()
    pre_quant: "Floats | None" = None
    """Factors [in] by which an engine multiplies the inputs, and a reader the columns; None: no such factors."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Tensors that are stored beside the weight: the last part of the name -> the tensor."""
    importance: "Floats | None" = None
    """For GGUF's blocks: the importance of each column [in], float32; None: columns are equal."""
    rounds_quotients: bool = True
    """For fp8: True if value / scale is rounded to the dtype of the weight before it is rounded to FP8."""


class Form(NamedTuple):
    """The form in which one tensor is stored."""

    kind: str
    """A dtype's name, a GGUF type, a quantization, FOLDED, or LEFT_OUT: not in the output.

    FOLDED is a norm, multiplied with the factors of its outputs. The quantizations are those of `quantizing.py`.
    """
    add: int = 0
    """A number that is added in float32. For FOLDED: the number that the norm adds to its weight."""
    joined: str = ""
    """A name that is equal for all tensors that share a scale; empty for a tensor that shares none."""
    brings_scale_2: bool = False
    """True if the shared scale is stored with this tensor. It is stored with one of several fused tensors."""
    scaling: Scaling = Scaling()
    group: int = 0
    """Elements of a row that share a scale, for integers in words and for MLX."""

    @property
    def is_quantized(self) -> bool:
        """True if readers get another tensor than is stored: a dequantized one, without its scales."""
        return self.kind in {*QUANTIZATIONS, *MLX_FLOATS} or self.keeps_dtype

    @property
    def alters(self) -> bool:
        """True if readers may get other values than the source's, apart from a cast."""
        return bool(self.add) or self.kind == FOLDED or self.is_quantized

    @property
    def keeps_dtype(self) -> bool:
        """True for a form that is read in the dtype that the tensor had."""
        return self.kind in AFFINE or self.kind == PLUS_ONE
