"""Tensors with a number added, in float32: the norms of GGUF and MLX, which store some of them plus one."""

from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.values import rounding


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
