"""Canonical tensors, each assembled from rectangles of native tensors: the form in which loaders stream them."""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, announce, reshaped
from formats.tensor import Part as Share
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.training import MASTER, ParamGroup

_log = logging.getLogger("megaconv")
_REMEDY = ". If the head was trained apart from the embedding, set tie_word_embeddings to false in config.json"
"""transformers 5 computes with both then, and older releases with the embedding alone."""


class SecondCopy(NamedTuple):
    """A second copy of the whole tensor, or of the part that `source` holds. It must equal the first copy."""

    part: "Part"
    description: str
    strict: bool
    """True if a difference is an error. If False, a difference is reported and the first copy wins."""


class Part(NamedTuple):
    """One rectangle of a canonical tensor, and the native tensor that holds it.

    `region` gives the rectangle, and the row and column of the native tensor at which it begins.
    """

    region: Region
    source: LazyTensor
    native: str = ""
    """The native tensor's name."""
    where: str = ""
    """The file or rank that holds the native tensor, for messages."""

    def read_into(self, wanted: Box, out: Bytes) -> None:
        """Read a rectangle of the canonical tensor into `out`. wanted: a rectangle inside this part's box."""
        self.region.order.read(self.region, wanted, self.source, out)


@dataclass(slots=True)
class Assembled:
    """A lazy canonical tensor. Its parts cover it without overlap."""

    key: Key
    shape: Shape
    dtype: str
    parts: Sequence[Part]
    copies: Sequence[SecondCopy] = ()
    shift: int = 0
    """The number that the native tensors have added to the canonical values."""
    _starts: list[int] | None = field(default=None, repr=False)
    """First rows of the parts, in ascending order.

    The parts are sorted only when the tensor is first read, because a model may have very many of them.
    """
    _reported: set[str] | None = field(default=None, repr=False)

    def announce(self, part: Share) -> None:
        """Have the bytes of this part of all native tensors fetched ahead."""
        for each in self.parts:
            announce(each.source, part)

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in self._overlapping(box):
            wanted = overlap(part.region.box, box)
            if wanted is not None:
                part.read_into(wanted, window(out, box, wanted, itemsize))
        for copy in self.copies:
            wanted = overlap(copy.part.region.box, box)
            if wanted is not None:
                self._compare(copy, wanted, window(out, box, wanted, itemsize))

    def _overlapping(self, box: Box) -> Sequence[Part]:
        if len(self.parts) == 1:
            return self.parts
        if self._starts is None:
            self.parts = sorted(
                self.parts, key=lambda part: (part.region.box.row0, part.region.box.col0)
            )
            self._starts = [part.region.box.row0 for part in self.parts]
        # Several parts (column shards) may share a row range: step back to the first part that still overlaps the box.
        first = max(0, bisect_right(self._starts, box.row0) - 1)
        while first and self.parts[first - 1].region.box.row1 > box.row0:
            first -= 1
        return self.parts[first : bisect_right(self._starts, box.row1 - 1)]

    def _compare(self, copy: SecondCopy, wanted: Box, expected: Bytes) -> None:
        found = np.empty(expected.shape, np.uint8)
        copy.part.read_into(wanted, found)
        if not np.array_equal(found, expected):
            if copy.strict:
                remedy = _REMEDY if self.key.name == "embed.weight" else ""
                raise TensorMismatch(
                    f"{self.key}: {copy.description} has other values; the checkpoint contradicts itself{remedy}"
                )
            self._reported = self._reported or set()
            if copy.description not in self._reported:
                self._reported.add(copy.description)
                _log.warning(
                    "%s: %s has other values; they are ignored, and the first copy is used",
                    self.key,
                    copy.description,
                )


def overlap(left: Box, right: Box) -> Box | None:
    """The intersection of two rectangles, or None."""
    row0, row1 = max(left.row0, right.row0), min(left.row1, right.row1)
    col0, col1 = max(left.col0, right.col0), min(left.col1, right.col1)
    return Box(row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None


def window(buffer: Bytes, box: Box, wanted: Box, itemsize: int) -> Bytes:
    """The part of a buffer that holds the rectangle `wanted`. box: the rectangle that the whole buffer holds."""
    cols = slice((wanted.col0 - box.col0) * itemsize, (wanted.col1 - box.col0) * itemsize)
    return buffer[wanted.row0 - box.row0 : wanted.row1 - box.row0, cols]


class Placed(NamedTuple):
    """A native tensor of the model, and the checkpoint's tensor for it."""

    native: NativeTensor
    tensor: LazyTensor
    where: str
    """The file, for messages."""
    slots: Mapping[str, LazyTensor] = MappingProxyType({})
    """The optimizer's tensors of this parameter, by slot."""
    group: ParamGroup | None = None
    """The optimizer's parameter group of this parameter; None if there is no optimizer state."""

    def of_slot(self, slot: str) -> "Placed":
        """The same place with the optimizer's tensor of this slot instead of the weight."""
        return self._replace(tensor=self.slots[slot], slots={})


def assemble(
    shapes: Mapping[str, Shape], placed: Iterable[Placed], *, strict: bool, slot: str = WEIGHT
) -> dict[Key, LazyTensor]:
    """Every canonical tensor, from the native tensors of a whole checkpoint, in the order of `shapes`.

    slot: the kind of tensor (WEIGHT or an optimizer slot). Slots other than WEIGHT exist only for parameters in
    `placed`.

    Replicas on other ranks and second copies of tied embeddings are compared while the tensor is read. A difference is
    an error if `strict`, otherwise it is reported. Raises TensorMismatch for native tensors of an unexpected shape.
    """
    found = _Found(strict=strict, is_shifted=slot in (WEIGHT, MASTER))
    for item in placed:
        check_shape(item)
        found.add(item)
    tensors: dict[Key, LazyTensor] = {}
    for name, shape in shapes.items():
        if slot == WEIGHT or name in found.parts:
            key = Key(name, slot)
            tensors[key] = found.assembled(key, shape)
    return tensors


@dataclass
class _Found:
    """The parts of canonical tensors by name, collected from native tensors."""

    strict: bool
    is_shifted: bool
    """True if native tensors of this slot store values with a constant added."""
    parts: dict[str, list[Part]] = field(default_factory=dict)
    copies: dict[str, list[SecondCopy]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    shifts: dict[str, int] = field(default_factory=dict)

    def add(self, item: Placed) -> None:
        """Add the parts in a native tensor. Raises TensorMismatch if its dtype is another than on other ranks."""
        native, tensor = item.native, item.tensor
        is_replica = native.replicated and any(name in self.parts for name in native.parts)
        if native.view is not None:
            tensor = reshaped(tensor, native.view)
        for name, regions in native.parts.items():
            parts = [Part(region, tensor, native.name, item.where) for region in regions]
            if native.copy is not None or is_replica:
                must_equal = self.strict or (native.copy is not None and native.copy.must_equal)
                description = f"the copy {native.name} in {item.where}"
                copies = [SecondCopy(part, description, must_equal) for part in parts]
                self.copies.setdefault(name, []).extend(copies)
                continue
            self.parts.setdefault(name, []).extend(parts)
            self.shifts[name] = native.shift if self.is_shifted else 0
            if self.dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise TensorMismatch(
                    f"{item.where}: {native.name} is {tensor.dtype}, other ranks have {self.dtypes[name]}"
                )

    def assembled(self, key: Key, shape: Shape) -> Assembled:
        """The canonical tensor of a key, from all of its parts."""
        name = key.name
        copies = self.copies.get(name, ())
        return Assembled(key, shape, self.dtypes[name], self.parts[name], copies, self.shifts[name])


def check_shape(item: Placed) -> None:
    if tuple(item.tensor.shape) != item.native.shape:
        raise TensorMismatch(
            f"{item.where}: {item.native.name} is {list(item.tensor.shape)}, expected {list(item.native.shape)} by the configuration",
            code="misshapen-tensor",
        )
