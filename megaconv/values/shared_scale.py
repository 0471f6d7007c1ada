"""A scale that several matrices share, because engines fuse them: q, k and v, gate and up, the experts of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, row_blocks
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import AT_ONCE, Unread
from megaconv.values.scaled import read_floats


@dataclass
class SharedScale:
    """The largest magnitude of all matrices, divided by the largest number of their codes; 1 for zeros."""

    members: Sequence[tuple[str, LazyTensor]]
    """Matrices by name."""
    largest_code: float
    format_name: str
    """For messages."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def scale(self) -> "np.float32":
        """The scale. Raises NotExpressible for a value that isn't finite."""
        with self._lock:
            return self._scale

    @cached_property
    def _scale(self) -> "np.float32":
        largest = max((self._largest(*member) for member in self.members), default=np.float32(0))
        return np.float32(largest / np.float32(self.largest_code)) or np.float32(1)

    def _largest(self, name: str, tensor: LazyTensor) -> "np.float32":
        """The largest magnitude of one matrix."""
        largest = np.float32(0)
        for box in row_blocks(tensor.shape, tensor.dtype, AT_ONCE * ITEMSIZE[tensor.dtype]):
            found = np.abs(read_floats(tensor, box)).max(initial=0)
            if not np.isfinite(found):
                raise NotExpressible(
                    f"{name}: holds values that are not finite, which {self.format_name} can't express"
                )
            largest = max(largest, found)
        return largest


@dataclass(frozen=True, eq=False)
class OneScale(Unread):
    """A shared scale as a tensor without axes."""

    shared: SharedScale
    dtype: str = "float32"
    shape: Shape = ()

    def read_into(self, box: Box, out: Bytes) -> None:
        np.copyto(out, np.array([[self.shared.scale]], np.float32).view(np.uint8))
