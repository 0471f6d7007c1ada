"""Tensors whose stored values differ from the canonical ones: quantized weights, GGUF's norms in float32 and its blocks.

The stream carries the stored values. Fingerprints hash the stored values too, except for quantized weights of a Hugging
Face output, where they hash what a reader gets.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from formats.gguf import BLOCK_TYPES
from formats.tensor import LazyTensor, Shape
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.values.added import AddedTensor
from megaconv.values.cast import CastTensor
from megaconv.values.code_tensors import READ_AS, Rounding
from megaconv.values.forms import FOLDED, LEFT_OUT, Form
from megaconv.values.ggml_blocks import BlockTensor, WeightedBlockTensor, blocks_shape
from megaconv.values.ggml_weighted import WEIGHTED
from megaconv.values.quantizing import quantized, quantized_infos, shared_scales
from megaconv.values.shared_scale import SharedScale
from megaconv.values.smoothed import FoldedTensor


def stored_shape(shape: Shape, form: Form) -> Shape:
    """The shape of the stream's tensor. A tensor of GGUF's blocks is a matrix of bytes."""
    return blocks_shape(shape, form.kind) if form.kind in BLOCK_TYPES else shape


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
        manifest: dict[Key, TensorInfo] = {}
        for key, info in self.source.header.manifest.items():
            form = self._form(key, info.dtype)
            if form.kind != LEFT_OUT:
                is_cast = form.is_quantized and not form.keeps_dtype
                read = TensorInfo(info.shape, READ_AS) if is_cast else info
                manifest[key] = read if form.is_quantized else stored[key]
        return replace(self.source.header, manifest=manifest)

    @property
    def is_quantized(self) -> bool:
        return any(form.is_quantized for form in self.forms.values())

    def _form(self, key: Key, dtype: str) -> Form:
        return self.forms.get(key, Form(dtype))

    @property
    def changed(self) -> frozenset[Key]:
        """The tensors whose values may differ from the source's."""
        return frozenset(key for key, form in self.forms.items() if form.alters)

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        tensors: Iterable[tuple[Key, LazyTensor]] = self.source.tensors()
        shared: Mapping[str, SharedScale] = {}
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
        if form.kind in BLOCK_TYPES:
            importance = form.scaling.importance
            if importance is not None and form.kind in WEIGHTED:
                return WeightedBlockTensor(tensor, form.kind, importance, str(key))
            return BlockTensor(tensor, form.kind, str(key))
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
        dtype = "uint8" if form.kind in BLOCK_TYPES else form.kind
        found = {key: TensorInfo(stored_shape(info.shape, form), dtype)}
    constants = form.scaling.constants.items()
    return found | {
        _beside(key, name): TensorInfo(each.shape, each.dtype) for name, each in constants
    }


def _beside(key: Key, name: str) -> Key:
    """The key of a constant that is stored beside a weight."""
    return key._replace(name=f"{key.name.removesuffix('.weight')}.{name}")
