"""Casts floating-point weights to another dtype, block by block while they are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, row_blocks
from megaconv.errors import NotExpressible, UsageError
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Header, Key, Source, TensorInfo, is_trained, shift_of
from megaconv.model.training import MASTER
from megaconv.values import rounding

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names that --dtype accepts, with the full names, which it accepts too."""

_KEPT = (".router.bias", "rope.alpha")
"""Endings of the names of tensors that Megatron and transformers always keep in float32."""
FLOATS = ("float64", "float32", "float16", "bfloat16")


def dtype_name(word: str) -> str:
    """The full name of a dtype: bf16 -> bfloat16. Raises UsageError for an unknown name."""
    name = DTYPES.get(word, word)
    if name not in DTYPES.values():
        raise UsageError(
            f"dtype {word!r} is not known; choose one of {', '.join(DTYPES)}, or quantize with --quantize FORM, or into GGUF with "
            "--option gguf_type=TYPE"
        )
    return name


@dataclass(frozen=True)
class CastTensor:
    """Another tensor's values in another dtype. A narrower dtype rounds to nearest even.

    A read raises NotExpressible if a finite number would become infinite, unless `overflow` is set.
    """

    source: LazyTensor
    dtype: str
    name: str
    """The tensor's name for messages."""
    overflow: bool

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def shift(self) -> int:
        return shift_of(self.source)

    def read_into(self, box: Box, out: Bytes) -> None:
        stored = np.empty((box.rows, box.cols * ITEMSIZE[self.source.dtype]), np.uint8)
        self.source.read_into(box, stored)
        made = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        try:
            rounding.convert(stored, self.source.dtype, made, self.dtype, overflow=self.overflow)
        except rounding.BeyondRange:
            raise NotExpressible(
                f"{self.name}: its largest value, {self._largest():g}, is beyond the range of {self.dtype}; "
                "choose another --dtype, or give --allow-lossy overflow to make such values infinite"
            ) from None
        if made is not out:
            np.copyto(out, made)

    def _largest(self) -> float:
        """The finite value of the largest magnitude. Reads the whole tensor."""
        largest = 0.0
        for box in row_blocks(self.shape, self.source.dtype, 1 << 20):
            stored = np.empty((box.rows, box.cols * ITEMSIZE[self.source.dtype]), np.uint8)
            self.source.read_into(box, stored)
            values = rounding.exact(stored, self.source.dtype)
            values = values[np.isfinite(values)]
            ends = (largest, float(values.min(initial=0)), float(values.max(initial=0)))
            largest = max(ends, key=abs)
        return largest


@dataclass(frozen=True)
class CastSource:
    """A source whose floating-point weights are cast to another dtype.

    The optimizer state keeps its meaning. Moments stay unchanged. If there are fp32 master weights, weights are rounded
    from them. An fp32 output has the masters as its weights and no separate masters. A 16-bit output of an fp32 source
    has the fp32 weights as its masters.
    """

    source: Source
    dtype: str
    overflow: bool = False
    """True if values beyond the dtype's range may become infinite. If False, such a value is an error."""

    @property
    def header(self) -> Header:
        header = self.source.header
        made = list(self._made(header.manifest))
        manifest = {
            key: TensorInfo(header.manifest[origin].shape, dtype) for key, origin, dtype in made
        }
        shifts = {key: header.shifts[origin] for key, origin, _ in made if origin in header.shifts}
        return replace(
            header,
            manifest=manifest,
            shifts=shifts,
            config=changed(header.config, {"dtype": self.dtype}),
        )

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        header = self.source.header
        if not header.carries_optimizer:
            for key, tensor in self.source.tensors():
                yield key, self._cast(key, tensor, self._dtype(key, tensor.dtype))
            return
        found = dict(self.source.tensors())
        for key, origin, dtype in self._made(header.manifest):
            yield key, self._cast(key, found[origin], dtype)

    def _made(self, manifest: Mapping[Key, TensorInfo]) -> Iterator[tuple[Key, Key, str]]:
        """(tensor, the tensor that it is computed from, its dtype) for every tensor of the output."""
        for key, info in manifest.items():
            master = Key(key.name, MASTER)
            best = master if master in manifest else key
            if key.slot == WEIGHT:
                dtype = self._dtype(key, info.dtype)
                yield key, key if dtype == info.dtype else best, dtype
                if (
                    dtype != "float32"
                    and manifest[best].dtype == "float32"
                    and is_trained(key.name, manifest)
                ):
                    yield master, best, "float32"
            elif key.slot != MASTER:
                yield key, key, info.dtype

    def _dtype(self, key: Key, dtype: str) -> str:
        if key.name.endswith(_KEPT) and ITEMSIZE[self.dtype] < ITEMSIZE[dtype]:
            return dtype
        return self.dtype if dtype in FLOATS else dtype

    def _cast(self, key: Key, tensor: LazyTensor, dtype: str) -> LazyTensor:
        return (
            tensor if tensor.dtype == dtype else CastTensor(tensor, dtype, str(key), self.overflow)
        )
