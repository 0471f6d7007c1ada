"""The bounded queue between a loader and a saver: a header, then every tensor once, then an end marker with the count.

Tensors in the queue are lazy, so a full queue needs little memory. A plain array from a plugin counts with its bytes
until it is taken. Both sides run concurrently. If one side ends, the other side ends with the first cause.
"""

import threading
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from typing import Any

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, byte_count, matrix_shape
from megaconv.errors import Cancelled, TensorMismatch
from megaconv.model.check import Ledger
from megaconv.model.ir import Header, Key

MAX_WAITING = 64
"""The largest number of units in the queue, if they are lazy."""

Unit = Sequence[tuple[Key, LazyTensor]]
"""One tensor, or tensors that a worker moves in step."""


class ArrayTensor:
    """A tensor in memory, which a plugin may supply instead of a lazy one."""

    def __init__(self, array: "np.ndarray[Any, Any]", shape: Shape, dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        rows, _ = matrix_shape(shape)
        raw = np.ascontiguousarray(array).view(np.uint8)
        self._bytes: Bytes = raw.reshape(rows, raw.size // rows if rows else 0)
        self.nbytes = self._bytes.nbytes

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        np.copyto(out, self._bytes[box.row0 : box.row1, box.col0 * itemsize : box.col1 * itemsize])


def as_lazy(tensor: Any) -> LazyTensor:
    """A numpy array or a torch tensor as a lazy tensor. A lazy tensor is returned unchanged."""
    if hasattr(tensor, "read_into"):
        return tensor  # type: ignore[no-any-return]
    if isinstance(tensor, np.ndarray):
        return ArrayTensor(tensor.reshape(-1), tensor.shape, str(tensor.dtype))
    if hasattr(tensor, "untyped_storage"):
        import torch

        raw = np.empty(0, np.uint8)
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ArrayTensor(raw, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    raise TensorMismatch(
        f"a {type(tensor).__name__} is not a tensor: expected a lazy tensor, a numpy array or a torch tensor"
    )


class Stream:
    """The queue. One loader thread puts tensors, any number of saver threads take them."""

    def __init__(self, budget_bytes: int, ahead: int | None = None) -> None:
        """ahead: distribute the units in the order of their arrival, and only this number of units from the first
        unfinished one on. None: the largest first.
        """
        self._budget_bytes, self._ahead = budget_bytes, ahead
        self._unfinished: set[int] = set()
        """Numbers of the units that are being written."""
        self._held_bytes = 0
        self._waiting: list[tuple[int, int, Unit]] = []
        """A heap of (-bytes, number, unit): the largest unit first, equal sizes in the order of arrival."""
        self._count = 0
        self._changed = threading.Condition()
        self._header: Header | None = None
        self._ledger: Ledger | None = None
        self._ended = False
        self._error: BaseException | None = None

    # The loader's side.

    def put_header(self, header: Header) -> None:
        with self._changed:
            self._raise_if_failed()
            self._header, self._ledger = header, Ledger(header.manifest)
            self._changed.notify_all()

    def put(self, key: Key, tensor: Any) -> None:
        """Put one tensor. Waits while the queue is full.

        Raises TensorMismatch if the tensor contradicts the manifest.
        """
        self.put_unit([(key, tensor)])

    def put_unit(self, tensors: Sequence[tuple[Key, Any]]) -> None:
        """Put tensors that one worker moves in step, as `put`."""
        unit = [(key, as_lazy(tensor)) for key, tensor in tensors]
        size = _held(unit)
        with self._changed:
            if self._ledger is None:
                raise TensorMismatch(f"{unit[0][0]}: a tensor came before the header")
            for key, tensor in unit:
                self._ledger.enter(key, tensor)
            self._changed.wait_for(lambda: self._error is not None or self._has_room(size))
            self._raise_if_failed()
            self._held_bytes += size
            self._count += 1
            nbytes = sum(byte_count(tensor.shape, tensor.dtype) for _, tensor in unit)
            rank = -nbytes if self._ahead is None else 0
            heappush(self._waiting, (rank, self._count, unit))
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < MAX_WAITING and (
            not self._held_bytes or self._held_bytes + size <= self._budget_bytes
        )

    def end(self, count: int) -> None:
        """Put the end marker. Raises TensorMismatch if tensors of the manifest are missing."""
        with self._changed:
            self._raise_if_failed()
            if self._ledger is None:
                raise TensorMismatch("the loader ended without a header")
            self._ledger.close(count)
            self._ended = True
            self._changed.notify_all()

    # The saver's side.

    def header(self) -> Header:
        """The header. Waits until the loader has put it."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._header is not None)
            self._raise_if_failed()
            assert self._header is not None
            return self._header

    def __iter__(self) -> Iterator[Unit]:
        """Distribute units among all threads that iterate. Ends after the last tensor of the manifest.

        The largest waiting unit comes first. If it came last (the head of a language model), one thread would work
        alone at the end.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error is not None or self._may_take() or self._is_over()
                )
                self._raise_if_failed()
                if not self._waiting:
                    return
                _, number, unit = heappop(self._waiting)
                self._unfinished.add(number)
                self._changed.notify_all()
            try:
                yield unit
            finally:
                with self._changed:
                    self._unfinished.discard(number)
                    self._held_bytes -= _held(unit)
                    self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._ended and not self._waiting

    def _may_take(self) -> bool:
        """True if a unit waits that a thread may begin."""
        if not self._waiting or self._ahead is None or not self._unfinished:
            return bool(self._waiting)
        return self._waiting[0][1] < min(self._unfinished) + self._ahead

    def upcoming(self, count: int) -> list[Unit]:
        """The units that come next, in their order, as far as they are in the queue."""
        with self._changed:
            return [unit for _, _, unit in nsmallest(count, self._waiting)]

    # Either side.

    def fail(self, error: BaseException) -> None:
        """End both sides with an error. Only the first error is kept."""
        with self._changed:
            if self._error is None and not isinstance(error, Cancelled):
                self._error = error
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise Cancelled("the other side ended first") from self._error


def _held(unit: Unit) -> int:
    """The bytes of a unit's tensors that are in memory already."""
    return sum(getattr(tensor, "nbytes", 0) for _, tensor in unit)
