"""Assigns parameters to buckets, and gives each its place there: a pure function of the shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from megatron_lite.parallel.parameters import ParameterInfo

ALIGNMENT = 16
"""Alignment in elements of parameters and of the ranks' parts."""


@dataclass(frozen=True)
class Member:
    """One parameter's place in a bucket."""

    info: ParameterInfo
    start: int
    end: int

    def between(self, first: int, last: int) -> range:
        """Return the member's elements among first..last of the bucket; an empty range if there are none."""
        return range(max(self.start, first), min(self.end, last))


@dataclass
class Filling:
    """The members of one bucket. All of them are reduced over the same ranks."""

    whole: bool
    """True if each member is assigned to one rank as a whole."""
    members: list[Member] = field(default_factory=list)
    elements: int = 0
    """Elements of the members, aligned."""

    @property
    def first(self) -> ParameterInfo:
        return self.members[0].info

    @property
    def in_float32(self) -> bool:
        """True if the members are float32 in a model of any dtype."""
        return self.first.in_float32

    @property
    def axis(self) -> str:
        """The grid axis of the ranks that share the bucket."""
        return self.first.reduced_over

    def add(self, info: ParameterInfo) -> None:
        """Append a parameter."""
        end = self.elements + prod(info.native.shape)
        self.members.append(Member(info, self.elements, end))
        self.elements = aligned(end, ALIGNMENT)


def fill(
    infos: Sequence[ParameterInfo], most: int, deals: Callable[[ParameterInfo], bool]
) -> list[Filling]:
    """Return the contents of all buckets, in the order of their first members.

    A bucket takes whole units (a layer, the embedding, the head) until it has `most` elements. A tied embedding has a
    separate bucket, so that both its ranks shard it in the same way.
    A bucket has one dtype, so float32 parameters of a model in another dtype have separate buckets.
    deals: returns whether a parameter is assigned to one rank as a whole. These parameters have separate buckets.
    """
    open_buckets: dict[tuple[str, bool, bool], Filling] = {}
    done: list[Filling] = []
    for _, unit in groupby(infos, key=unit_of):
        for info in unit:
            whole = deals(info)
            ranks = f"tied {info.name}" if info.tied else info.reduced_over
            bucket = open_buckets.setdefault((ranks, whole, info.in_float32), Filling(whole))
            bucket.add(info)
        full = [key for key, bucket in open_buckets.items() if bucket.elements >= most]
        done += [open_buckets.pop(key) for key in full]
    done += open_buckets.values()
    order = {info.name: place for place, info in enumerate(infos)}
    return sorted(done, key=lambda bucket: order[bucket.first.name])


def unit_of(info: ParameterInfo) -> str:
    """Return the unit that a forward pass waits for: a layer, or a module outside the layers."""
    parts = info.name.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["layers"] else ".".join(parts[:2])


def padded(used: int, ranks: int) -> int:
    """Return the size of a bucket with padding, so that every rank has an aligned part."""
    return aligned(used, ranks * ALIGNMENT)


def aligned(count: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-count // multiple) * multiple
