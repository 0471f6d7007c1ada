"""Tensors whose stored values differ from the canonical ones: GGUF's norms in float32, matrices in Q8_0.

The stream carries, and fingerprints hash, the stored values. Q8_0 (ggml's quantize_row_q8_0_ref) has blocks of 32
numbers x of a row:

    d = max |x| / 127 in float32;  q = x * (1 / d), halves away from zero;  stored as float16(d), then 32 signed bytes
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from formats.gguf import BLOCK, BLOCK_BYTES
from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.options import FP8_BLOCK, FP8_PER_CHANNEL, NVFP4, QUANTIZATIONS
from megaconv.values import fp8_blocks, fp8_rows, nvfp4, rounding
from megaconv.values.cast import CastTensor
from megaconv.values.fp8_blocks import READ_AS, Blocks, Fp8Scales, Fp8Values, Rounding, grid
from megaconv.values.fp8_rows import Rows, RowScales
from megaconv.values.nvfp4 import Fp4Scale2, Fp4Scales, Fp4Values, Groups, Joined, scales_shape

LEFT_OUT = "left out"


class Form(NamedTuple):
    """The form in which one tensor is stored."""

    kind: str
    """A dtype's name, `q8_0`, a quantization, or LEFT_OUT: not in the output.

    The quantizations are `fp8-block` (`fp8_blocks.py`), `fp8-per-channel` (`fp8_rows.py`) and `nvfp4` (`nvfp4.py`).
    """
    add: int = 0
    """A number that is added in float32."""
    joined: str = ""
    """A name that is equal for all tensors that share nvfp4's scale_2."""
    brings_scale_2: bool = False
    """True if scale_2 is stored with this tensor. It is stored with one of several fused tensors."""

    @property
    def is_quantized(self) -> bool:
        """True if readers get a dequantized tensor, without its scales."""
        return self.kind in QUANTIZATIONS


def stored_shape(shape: Shape, form: Form) -> Shape:
    """The shape of the stream's tensor. Q8_0 is a matrix of bytes."""
    if form.kind != "q8_0":
        return shape
    rows, cols = matrix_shape(shape)
    return rows, cols // BLOCK * BLOCK_BYTES


@dataclass(frozen=True)
class AddedTensor:
    """Another tensor's values in float32, with a number added."""

    source: LazyTensor
    add: int
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        stored = np.empty((box.rows, box.cols * ITEMSIZE[self.source.dtype]), np.uint8)
        self.source.read_into(box, stored)
        numbers = rounding.exact(stored.reshape(-1), self.source.dtype).astype(
            np.float32
        ) + np.float32(self.add)
        np.copyto(out, numbers.view(np.uint8).reshape(out.shape))


@dataclass(frozen=True)
class Q8Tensor:
    """Another tensor's rows in Q8_0, as bytes."""

    source: LazyTensor
    dtype: str = "uint8"

    @property
    def shape(self) -> Shape:
        return stored_shape(self.source.shape, Form("q8_0"))

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.col0 // BLOCK_BYTES, -(-box.col1 // BLOCK_BYTES)
        wanted = Box(box.row0, box.row1, first * BLOCK, last * BLOCK)
        stored = np.empty((wanted.rows, wanted.cols * ITEMSIZE[self.source.dtype]), np.uint8)
        self.source.read_into(wanted, stored)
        numbers = rounding.exact(stored.reshape(-1), self.source.dtype).astype(np.float32)
        made = q8_0(numbers.reshape(-1, BLOCK)).reshape(wanted.rows, -1)
        np.copyto(out, made[:, box.col0 - first * BLOCK_BYTES : box.col1 - first * BLOCK_BYTES])


def q8_0(blocks: Floats) -> Bytes:
    """Quantize [blocks, 32] float32 -> [blocks, 34] bytes."""
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    scaled = blocks * inverse[:, None]
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    made = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    made[:, :2] = scale.astype(np.float16)[:, None].view(np.uint8)
    made[:, 2:] = rounded.astype(np.int8).view(np.uint8)
    return made


@dataclass(frozen=True)
class StoredSource:
    """A source whose tensors have their stored form. A tensor without a given form stays unchanged."""

    source: Source
    forms: Mapping[Key, Form]
    overflow: bool
    errors: Rounding = field(default_factory=Rounding)
    """The rounding error of the quantized tensors that have been read."""

    @property
    def header(self) -> Header:
        header = self.source.header
        manifest: dict[Key, TensorInfo] = {}
        for key, info in header.manifest.items():
            manifest |= _stored_infos(key, info, self._form(key, info.dtype))
        return replace(header, manifest=manifest)

    @property
    def read_header(self) -> Header:
        """The header for readers of the output: dequantized weights instead of quantized ones, without scales."""
        stored = self.header.manifest
        manifest = {
            key: TensorInfo(info.shape, READ_AS)
            if self._form(key, info.dtype).is_quantized
            else stored[key]
            for key, info in self.source.header.manifest.items()
            if self._form(key, info.dtype).kind != LEFT_OUT
        }
        return replace(self.source.header, manifest=manifest)

    @property
    def is_quantized(self) -> bool:
        return any(form.is_quantized for form in self.forms.values())

    def _form(self, key: Key, dtype: str) -> Form:
        return self.forms.get(key, Form(dtype))

    @property
    def changed(self) -> frozenset[Key]:
        """The tensors whose values differ from the source's."""
        return frozenset(key for key, form in self.forms.items() if form.add)

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        tensors: Iterable[tuple[Key, LazyTensor]] = self.source.tensors()
        joined: dict[str, Joined] = {}
        if any(form.joined for form in self.forms.values()):
            tensors = list(tensors)
            joined = self._joined(tensors)
        for key, tensor in tensors:
            form = self._form(key, tensor.dtype)
            if form.kind == FP8_BLOCK:
                blocks = Blocks(tensor, str(key))
                yield key, Fp8Values(blocks, self.errors)
                yield _named(key, fp8_blocks.SCALES), Fp8Scales(blocks)
            elif form.kind == FP8_PER_CHANNEL:
                rows = Rows(tensor, str(key))
                yield key, Fp8Values(rows, self.errors)
                yield _named(key, fp8_rows.SCALES), RowScales(rows)
            elif form.kind == NVFP4:
                groups = Groups(tensor, joined[form.joined])
                yield key, Fp4Values(groups, self.errors)
                yield _named(key, nvfp4.SCALES), Fp4Scales(groups)
                if form.brings_scale_2:
                    yield _named(key, nvfp4.SCALE_2), Fp4Scale2(groups.joined)
            elif form.kind != LEFT_OUT:
                yield key, self._stored(key, tensor, form)

    def _joined(self, tensors: Iterable[tuple[Key, LazyTensor]]) -> dict[str, Joined]:
        members: dict[str, list[tuple[str, LazyTensor]]] = {}
        for key, tensor in tensors:
            members.setdefault(self._form(key, tensor.dtype).joined, []).append((str(key), tensor))
        return {name: Joined(found) for name, found in members.items() if name}

    def _stored(self, key: Key, tensor: LazyTensor, form: Form) -> LazyTensor:
        if form.kind == "q8_0":
            return Q8Tensor(tensor)
        if form.add:
            return AddedTensor(tensor, form.add)
        return (
            tensor
            if tensor.dtype == form.kind
            else CastTensor(tensor, form.kind, str(key), self.overflow)
        )


def _stored_infos(key: Key, info: TensorInfo, form: Form) -> dict[Key, TensorInfo]:
    """Shape and dtype of a stored tensor, and of its scales."""
    if form.kind == LEFT_OUT:
        return {}
    if form.kind == FP8_BLOCK:
        scales = {_named(key, fp8_blocks.SCALES): TensorInfo(grid(info.shape), "float32")}
        return {key: TensorInfo(info.shape, "float8_e4m3fn"), **scales}
    if form.kind == FP8_PER_CHANNEL:
        shape = fp8_rows.scales_shape(info.shape)
        row_scales = {_named(key, fp8_rows.SCALES): TensorInfo(shape, "float32")}
        return {key: TensorInfo(info.shape, "float8_e4m3fn"), **row_scales}
    if form.kind == NVFP4:
        rows, cols = matrix_shape(info.shape)
        return {
            key: TensorInfo((rows, cols // 2), "uint8"),
            _named(key, nvfp4.SCALES): TensorInfo(scales_shape(info.shape), "float8_e4m3fn"),
            **(
                {_named(key, nvfp4.SCALE_2): TensorInfo((), "float32")}
                if form.brings_scale_2
                else {}
            ),
        }
    return {
        key: TensorInfo(
            stored_shape(info.shape, form), "uint8" if form.kind == "q8_0" else form.kind
        )
    }


def _named(key: Key, end: str) -> Key:
    return key._replace(name=key.name + end)
