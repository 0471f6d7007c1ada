"""Change of dtype on the way: the only arithmetic there is, and the only reason to import torch while converting."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.errors import UsageError
from megaconv.ir import WEIGHT, Header, Key, Source, TensorInfo

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What --dtype accepts; the full names are accepted too."""

_FLOATS = ("float64", "float32", "float16", "bfloat16")


def dtype_name(word: str) -> str:
    """bf16 -> bfloat16. Raises UsageError."""
    name = DTYPES.get(word, word)
    if name not in DTYPES.values():
        raise UsageError(f"dtype {word!r} is not known; choose one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class CastTensor:
    """Another tensor's values, rounded to nearest even where the dtype is narrower."""

    source: LazyTensor
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        import torch

        raw = np.empty((box.rows, box.cols * ITEMSIZE[self.source.dtype]), np.uint8)
        self.source.read_into(box, raw)
        values: Any = torch.from_numpy(raw).view(getattr(torch, self.source.dtype))
        np.copyto(out, values.to(getattr(torch, self.dtype)).view(torch.uint8).numpy())


@dataclass(frozen=True)
class CastSource:
    """A source whose floating-point weights come in another dtype."""

    source: Source
    dtype: str

    @property
    def header(self) -> Header:
        header = self.source.header
        manifest = {key: TensorInfo(info.shape, self._dtype(key, info.dtype)) for key, info in header.manifest.items()}
        return replace(header, manifest=manifest, config=replace(header.config, dtype=self.dtype))

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        for key, tensor in self.source.tensors():
            dtype = self._dtype(key, tensor.dtype)
            yield key, tensor if dtype == tensor.dtype else CastTensor(tensor, dtype)

    def _dtype(self, key: Key, dtype: str) -> str:
        if key.name.endswith(".router.bias") and ITEMSIZE[self.dtype] < ITEMSIZE[dtype]:
            return dtype  # Megatron and transformers keep it in float32 whatever the model has
        return self.dtype if key.slot == WEIGHT and dtype in _FLOATS else dtype
