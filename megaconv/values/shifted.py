"""Tensors that a naming scheme stores with a number added, such as norms that multiply with their weight + 1.

A saver with `holds_shifted` gets a tensor as its source stores it, with the number (`shift`). Between two such
checkpoints no bit changes, even if the canonical value has no exact floating-point representation. For any other output
the value is computed, and must give the same bits when it is converted back. Hashes are computed from canonical values,
so that fingerprints don't depend on the way of storage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, ComputedTensor, LazyTensor
from megaconv.errors import NotExpressible
from megaconv.model.ir import WEIGHT, Header, Key, Source, shift_of
from megaconv.model.training import MASTER
from megaconv.values import rounding
from megaconv.values.cast import CastTensor


def add(values: Bytes, dtype: str, number: int) -> Bytes:
    """A contiguous array of bytes with a number added to each element, rounded to nearest."""
    numbers = rounding.exact(values, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        if dtype == "float64":
            return (numbers + number).view(np.uint8)
        return rounding.rounded(numbers + np.float32(number), dtype)


def add_exactly(values: Bytes, dtype: str, number: int) -> Bytes | None:
    """The result of `add`; None if subtracting the number again doesn't restore the same bits."""
    made = add(values, dtype, number)
    return made if np.array_equal(add(made, dtype, -number), values) else None


def add_or_refuse(values: Bytes, dtype: str, number: int, name: str) -> Bytes:
    """The result of `add_exactly`. Raises NotExpressible, which names the tensor, if there is none."""
    made = add_exactly(values, dtype, number)
    if made is None:
        found = rounding.exact(values, dtype).reshape(-1)
        shifted = add(values, dtype, number)
        back = rounding.exact(add(shifted, dtype, -number), dtype).reshape(-1)
        first = found[np.flatnonzero(found != back)[:1]]
        value = f" ({first[0]:g})" if first.size else ""
        remedy = "--transformer-impl local"
        if number >= 0:
            remedy = "--allow-lossy out_norm to have it rounded"
        if dtype != "float32":
            remedy = f"--dtype float32, or {remedy}"
        raise NotExpressible(
            f"{name}: a weight{value} would be stored with {number:+d} there, for which {dtype} has no exact value; "
            f"convert it with {remedy}"
        )
    return made


class ShiftedHasher:
    """Hashes canonical values.

    If a canonical value has no exact value in the dtype, the stored values are hashed with a mark, so no other tensor
    has this hash.
    """

    def __init__(self, plain: Any, marked: Any, dtype: str, shift: int) -> None:
        """plain, marked: hashers that have already hashed dtype and shape."""
        self._plain, self._marked, self._dtype, self._shift = plain, marked, dtype, shift
        self._exact = True

    def update(self, values: Bytes) -> None:
        self._marked.update(values)
        made = add_exactly(values, self._dtype, -self._shift) if self._exact else None
        self._exact = made is not None
        if made is not None:
            self._plain.update(made.reshape(-1))

    def hexdigest(self) -> str:
        return str((self._plain if self._exact else self._marked).hexdigest())


@dataclass(frozen=True)
class PlainTensor(ComputedTensor):
    """The canonical values of a shifted tensor.

    If the dtype has no exact value, a read raises NotExpressible, or rounds if `exact` is False.
    """

    by: int
    """The source's shift."""
    name: str
    exact: bool

    def read_into(self, box: Box, out: Bytes) -> None:
        stored = np.empty((box.rows, box.cols * ITEMSIZE[self.dtype]), np.uint8)
        self.source.read_into(box, stored)
        if self.exact:
            np.copyto(out, add_or_refuse(stored, self.dtype, -self.by, self.name))
        else:
            np.copyto(out, add(stored, self.dtype, -self.by))


def plain(key: Key, tensor: LazyTensor, *, exact: bool = False) -> LazyTensor:
    """The tensor with canonical values. If its dtype has no exact value, a read rounds, or raises if `exact`."""
    shift = shift_of(tensor)
    return PlainTensor(tensor, shift, str(key), exact) if shift else tensor


@dataclass(frozen=True)
class PlainSource:
    """A source whose tensors all have canonical values.

    If a dtype has no exact value, a read rounds, or raises if `exact`.
    """

    source: Source
    exact: bool

    @property
    def header(self) -> Header:
        return replace(self.source.header, shifts={})

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        shifts = self.source.header.shifts
        if not shifts:
            yield from self.source.tensors()
            return
        found = dict(self.source.tensors())
        for key, tensor in found.items():
            master = found.get(Key(key.name, MASTER))
            if key.slot == WEIGHT and key in shifts and master is not None:
                # Round from the master: the weight in the source is the rounded master, too.
                exact = plain(Key(key.name, MASTER), master, exact=self.exact)
                yield key, CastTensor(exact, tensor.dtype, str(key), overflow=False)
            else:
                yield key, plain(key, tensor, exact=self.exact)
