"""A tensor that a checkpoint holds partly a second time: both copies are compared while the tensor is read."""

from dataclasses import dataclass

from formats.chunked import ChunkedTensor
from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, LazyTensor, Shape


@dataclass(frozen=True)
class ComparedTensor:
    """A lazy tensor that raises CorruptCheckpoint, with this message, if a read shows that the two copies differ."""

    tensor: LazyTensor
    copy: ChunkedTensor
    """The second copy, of the same shape and dtype. Its chunks may cover only a part."""
    message: str

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        self.tensor.read_into(box, out)
        again = np.ascontiguousarray(out).copy()
        self.copy.read_into(box, again)  # elements that the copy doesn't have stay as they are
        if not np.array_equal(out, again):
            raise CorruptCheckpoint(self.message)
