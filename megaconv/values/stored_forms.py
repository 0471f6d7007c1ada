"""Tensors whose stored values differ from the canonical ones: GGUF's norms in float32, matrices in Q8_0.

The stream carries, and fingerprints hash, the stored values. Q8_0 (ggml's quantize_row_q8_0_ref) has blocks of 32
numbers x of a row:

    d = max |x| / 127 in float32;  q = x * (1 / d), halves away from zero;  stored as float16(d), then 32 signed bytes
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from formats.gguf import BLOCK, BLOCK_BYTES
from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.values import rounding
from megaconv.values.cast import CastTensor
from megaconv.values.forms import FOLDED, LEFT_OUT, Form
from megaconv.values.fp8_blocks import READ_AS, Rounding
from megaconv.values.quantizing import Shared, quantized, quantized_infos, shared_scales
from megaconv.values.smoothed import FoldedTensor


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
        return frozenset(key for key, form in self.forms.items() if form.add or form.kind == FOLDED)

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        tensors: Iterable[tuple[Key, LazyTensor]] = self.source.tensors()
        shared: Mapping[str, Shared] = {}
        if any(form.joined for form in self.forms.values()):
            tensors = list(tensors)
            shared = shared_scales(tensors, self.forms)
        for key, tensor in tensors:
            form = self._form(key, tensor.dtype)
            if form.kind == LEFT_OUT:
                continue
            if form.is_quantized:
                yield from quantized(key, tensor, form, shared.get(form.joined), self.errors)
            else:
                yield key, self._stored(key, tensor, form)
            for name, constant in form.scaling.constants.items():
                yield _beside(key, name), constant

    def _stored(self, key: Key, tensor: LazyTensor, form: Form) -> LazyTensor:
        if form.kind == "q8_0":
            return Q8Tensor(tensor)
        if form.kind == FOLDED:
            (step,) = form.scaling.steps
            return FoldedTensor(tensor, step.times, form.add)
        if form.add:
            return AddedTensor(tensor, form.add)
        return (
            tensor
            if tensor.dtype == form.kind
            else CastTensor(tensor, form.kind, str(key), self.overflow)
        )


def _stored_infos(key: Key, info: TensorInfo, form: Form) -> dict[Key, TensorInfo]:
    """Shape and dtype of a stored tensor, and of the tensors that are stored beside it."""
    if form.kind == LEFT_OUT:
        return {}
    if form.is_quantized:
        found = quantized_infos(key, info, form)
    elif form.kind == FOLDED:
        found = {key: info}
    else:
        dtype = "uint8" if form.kind == "q8_0" else form.kind
        found = {key: TensorInfo(stored_shape(info.shape, form), dtype)}
    constants = form.scaling.constants.items()
    return found | {
        _beside(key, name): TensorInfo(each.shape, each.dtype) for name, each in constants
    }


def _beside(key: Key, name: str) -> Key:
    """The key of a constant that is stored beside a weight."""
    return key._replace(name=f"{key.name.removesuffix('.weight')}.{name}")
