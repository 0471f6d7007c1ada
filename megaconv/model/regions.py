"""Native tensors as rectangles of canonical ones: what `natives.py` makes of a table, and all that loaders and savers need of it."""

from collections.abc import Mapping
from typing import NamedTuple

from formats.tensor import Box, Shape


class Region(NamedTuple):
    """A rectangle of a canonical tensor, and where in the native one its first element lies.

    Untransposed rectangles are as wide as the native tensor. transposed: the rectangle's rows are native columns.
    pairs > 0: rows come in heads of that many, from a head's first row on; the native tensor has row i of a head's first
    half and row i of its second one after the other (Meta's rotary order).
    halves: the rectangle's rows alternate between the two halves of as many native rows, its first row in the first half.
    row_step: the distance between its rows in the native tensor; more than 1 only in old files, which are read and not written.
    repeat > 1: the rectangle is a single row that is stored that many times (vocabulary padding).
    """

    box: Box
    row: int
    col: int = 0
    transposed: bool = False
    pairs: int = 0
    halves: bool = False
    row_step: int = 1
    repeat: int = 1


class Copy(NamedTuple):
    """A native tensor that holds again what another one of the same checkpoint holds. A source may lack it."""

    written: bool
    """Whether such a checkpoint has it by rights, so that savers write it."""
    used: bool = True
    """Whether the model computes with it: what an unused copy holds means nothing."""
    must_equal: bool = False
    """Whether it is trained for itself: with other values it is another model."""


class NativeTensor(NamedTuple):
    """One tensor of a checkpoint file: which canonical tensors' rectangles it is made of."""

    name: str
    parts: Mapping[str, tuple[Region, ...]]
    """By canonical name."""
    shape: Shape
    replicated: bool = False
    """Every tensor-parallel rank holds the same copy."""
    tp: int | None = None
    """The axis that tensor parallelism shards, or expert tensor parallelism; None where it shards none."""
    groups: int | None = None
    """Of a tensor joined by groups: how many the whole one has. A rank has some of them, or where there are more ranks an
    even share of the rows."""
    copy: Copy | None = None
    """Set if it is a second copy."""
    of_experts: bool = False
    """Held by one expert-parallel rank, where others hold other experts."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""
    view: tuple[int, int] | None = None
    """The matrix that regions count rows and columns in, where it is not that of the shape."""
    shift: int = 0
    """What was added to the canonical elements."""
