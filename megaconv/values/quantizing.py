"""The tensors that a quantized weight becomes: its codes, its scales, and the constants of its activations.

    fp8-block          x [out, in] float8_e4m3fn, x_scale_inv [out / 128, in / 128] float32           fp8_blocks.py
    fp8-per-channel    x [out, in] float8_e4m3fn, x_scale [out] float32                               fp8_rows.py
    nvfp4              x [out, in / 2] uint8, x_scale [out, in / 16] float8_e4m3fn, x_scale_2 []      nvfp4.py
    mxfp4              x [out, in / 32, 16] uint8, x_scale [out, in / 32] uint8                       mxfp4.py
    w4a16, w8a16       x [out, in / 8 or 4] int32, x_scale [out, in / group]                          grouped_integers.py
    fp8                x [out, in] float8_e4m3fn, x_scale []                                          calibrated.py
    int8-sq            x [out, in] int8, x_scale [out]                                                calibrated.py
    int4-awq           x [out / 2, in] uint8, x_scale [out, in / 128]                                 calibrated.py
    w4a8-awq           the same, and x_scale_2 []                                                     calibrated.py
    affine-4 ...       x [out, in * bits / 32] uint32, x_scale and x_bias [out, in / group]           mlx_quantizing.py
    mlx-mxfp4 ...      x [out, in * bits / 32] uint32, x_scale [out, in / group] uint8                mlx_floats.py
    plus one           x [out]: a norm with 1 added                                                   mlx_quantizing.py

A shared scale (`x_scale_2`, and the scale of fp8) is stored with one of the weights that a file fuses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from formats.tensor import Box, Bytes, LazyTensor, Shape
from megaconv.model.ir import Key, TensorInfo
from megaconv.options import (
    FP8,
    FP8_BLOCK,
    FP8_PER_CHANNEL,
    INT4_AWQ,
    INT8_SQ,
    MXFP4,
    NVFP4,
    W4A8_AWQ,
    W4A16,
    W8A16,
)
from megaconv.values import fp8_blocks, fp8_rows, grouped_integers, mxfp4, nvfp4
from megaconv.values.calibrated import (
    ByteCodes,
    Fp8,
    Int4Groups,
    Int4Scales,
    Int8Rows,
    Matrix,
    NibbleCodes,
)
from megaconv.values.code_tensors import Rounding
from megaconv.values.forms import AFFINE, MLX_FLOATS, PLUS_ONE, Form
from megaconv.values.fp8_blocks import LARGEST, Blocks, Fp8Scales, Fp8Values
from megaconv.values.fp8_rows import Rows, RowScales
from megaconv.values.mlx_floats import FloatCodes, FloatGroups, FloatScales
from megaconv.values.mlx_quantizing import AffineCodes, AffineGroups, AffineScales, PlusOne
from megaconv.values.nvfp4 import Fp4Scales, Fp4Values, Groups
from megaconv.values.shared_scale import OneScale, SharedScale
from megaconv.values.smoothed import SmoothedTensor

SCALE, SCALE_2 = nvfp4.SCALES, nvfp4.SCALE_2
"""The suffixes of the scales' names after the weight's name."""
BIAS = "_bias"
"""The suffix of the name of MLX's biases."""
_Made = Iterator[tuple[str, LazyTensor]]


@dataclass(frozen=True)
class Weight:
    """A weight to be quantized."""

    name: str
    tensor: LazyTensor
    form: Form
    shared: SharedScale | None
    errors: Rounding

    @property
    def smoothed(self) -> LazyTensor:
        return smoothed(self.tensor, self.form)


def smoothed(tensor: LazyTensor, form: Form) -> LazyTensor:
    """The tensor after the factors of its columns, if the form has any."""
    steps = form.scaling.steps
    return SmoothedTensor(tensor, steps) if steps else tensor


def quantized(
    key: Key, tensor: LazyTensor, form: Form, shared: SharedScale | None, errors: Rounding
) -> Iterator[tuple[Key, LazyTensor]]:
    """Yield the tensors that a weight becomes, its own key first."""
    weight = Weight(str(key), tensor, form, shared, errors)
    for suffix, made in _WRITTEN[form.kind](weight):
        yield key._replace(name=key.name + suffix), made


def shared_scales(
    tensors: Iterable[tuple[Key, LazyTensor]], forms: Mapping[Key, Form]
) -> dict[str, SharedScale]:
    """The scales that several weights share, by the name in their forms."""
    members: dict[str, list[tuple[str, LazyTensor]]] = {}
    kinds: dict[str, str] = {}
    for key, tensor in tensors:
        form = forms.get(key)
        if form is not None and form.joined:
            members.setdefault(form.joined, []).append((str(key), smoothed(tensor, form)))
            kinds[form.joined] = form.kind
    return {name: _shared_scale(kinds[name], found) for name, found in members.items()}


def _shared_scale(kind: str, members: Sequence[tuple[str, LazyTensor]]) -> SharedScale:
    return nvfp4.shared_scale(members) if kind == NVFP4 else SharedScale(members, LARGEST, "FP8")


@dataclass(frozen=True)
class Described:
    """A tensor of which only shape and dtype are known. Nothing can be read from it."""

    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        raise AssertionError("a description has no content")


def quantized_infos(key: Key, info: TensorInfo, form: Form) -> dict[Key, TensorInfo]:
    """Shape and dtype of the tensors that a weight becomes."""
    nothing = _shared_scale(form.kind, ())
    described = Described(tuple(info.shape), info.dtype)
    made = quantized(key, described, form, nothing, Rounding())
    return {name: TensorInfo(tuple(each.shape), each.dtype) for name, each in made}


def _fp8_block(weight: Weight) -> _Made:
    blocks = Blocks(weight.tensor, weight.name)
    yield "", Fp8Values(blocks, weight.errors)
    yield fp8_blocks.SCALES, Fp8Scales(blocks)


def _fp8_per_channel(weight: Weight) -> _Made:
    rows = Rows(weight.tensor, weight.name)
    yield "", Fp8Values(rows, weight.errors)
    yield fp8_rows.SCALES, RowScales(rows)


def _nvfp4(weight: Weight) -> _Made:
    assert weight.shared is not None
    groups = Groups(weight.tensor, weight.shared)
    yield "", Fp4Values(groups, weight.errors)
    yield SCALE, Fp4Scales(groups)
    if weight.form.brings_scale_2:
        yield SCALE_2, OneScale(weight.shared)


def _mxfp4(weight: Weight) -> _Made:
    blocks = mxfp4.Blocks(weight.tensor, weight.name)
    yield "", mxfp4.Mxfp4Codes(blocks, weight.errors)
    yield SCALE, mxfp4.Mxfp4Exponents(blocks)


def _packed(weight: Weight) -> _Made:
    bits = 4 if weight.form.kind == W4A16 else 8
    groups = grouped_integers.Groups(weight.tensor, weight.name, bits, weight.form.group)
    yield "", grouped_integers.PackedCodes(groups, weight.errors)
    yield SCALE, grouped_integers.PackedScales(groups)


def _fp8(weight: Weight) -> _Made:
    assert weight.shared is not None
    rounds = weight.form.scaling.rounds_quotients
    quantizer = Fp8(weight.shared, weight.tensor.dtype if rounds else "float32")
    yield "", ByteCodes(Matrix(weight.tensor, weight.tensor, quantizer, None), weight.errors)
    if weight.form.brings_scale_2:
        yield SCALE, OneScale(weight.shared)


def _int8_sq(weight: Weight) -> _Made:
    rows = Rows(weight.smoothed, weight.name, 127.0, "INT8")
    pre_quant = weight.form.scaling.pre_quant
    matrix = Matrix(weight.tensor, weight.smoothed, Int8Rows(rows), pre_quant)
    yield "", ByteCodes(matrix, weight.errors)
    yield SCALE, RowScales(rows)


def _int4_awq(weight: Weight) -> _Made:
    quantizer = Int4Groups(weight.name)
    pre_quant = weight.form.scaling.pre_quant
    matrix = Matrix(weight.tensor, weight.smoothed, quantizer, pre_quant)
    yield "", NibbleCodes(matrix, weight.errors)
    yield SCALE, Int4Scales(weight.smoothed, quantizer)


def _w4a8_awq(weight: Weight) -> _Made:
    assert weight.shared is not None
    yield from _int4_awq(weight)
    if weight.form.brings_scale_2:
        yield SCALE_2, OneScale(weight.shared)


def _affine(weight: Weight) -> _Made:
    bits = AFFINE[weight.form.kind]
    groups = AffineGroups(weight.tensor, weight.name, bits, weight.form.group)
    yield "", AffineCodes(groups, weight.errors)
    yield SCALE, AffineScales(groups, of_biases=False)
    yield BIAS, AffineScales(groups, of_biases=True)


def _mlx_floats(weight: Weight) -> _Made:
    groups = FloatGroups(weight.tensor, weight.name, MLX_FLOATS[weight.form.kind])
    yield "", FloatCodes(groups, weight.errors)
    yield SCALE, FloatScales(groups)


def _plus_one(weight: Weight) -> _Made:
    yield "", PlusOne(weight.tensor, weight.errors)


_WRITTEN: Mapping[str, Callable[[Weight], _Made]] = {
    FP8_BLOCK: _fp8_block,
    FP8_PER_CHANNEL: _fp8_per_channel,
    NVFP4: _nvfp4,
    MXFP4: _mxfp4,
    W4A16: _packed,
    W8A16: _packed,
    FP8: _fp8,
    INT8_SQ: _int8_sq,
    INT4_AWQ: _int4_awq,
    W4A8_AWQ: _w4a8_awq,
    **dict.fromkeys(AFFINE, _affine),
    **dict.fromkeys(MLX_FLOATS, _mlx_floats),
    PLUS_ONE: _plus_one,
}
"""Quantization -> the tensors of a weight by the suffix of their names."""
