"""Tensors that are moved in step, because they fill the rows of one output tensor in turn: q, k and v, group by group.

If they were written one after another, almost all parts of the output tensor would be incomplete until the last of them
came. In step, each of them is still read from its first to its last row, but a block of that one is next of which the
smallest share was read. The tensors of a fused tensor have equal shares of their rows in each group, so the output
tensor grows from its start to its end.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import merge
from itertools import pairwise

from formats.partial_files import Span
from formats.tensor import Box
from megaconv.engine.plan import OutputPlan
from megaconv.model.ir import Key


def share(row: int, rows: int) -> float:
    """The share of a tensor before a row: 0.0 before the first one. It never falls while the row rises."""
    return row / max(1, rows)


def in_step(tensors: Sequence[tuple[int, Iterator[Box]]]) -> Iterator[tuple[int, Box]]:
    """Yield (number of the tensor, a block of it), by the share of the tensor before the block.

    tensors: each tensor's number of rows, and its blocks in the order of their rows.
    """
    for _, number, box in merge(
        *(_with_shares(number, *each) for number, each in enumerate(tensors)),
        key=lambda found: found[:2],
    ):
        yield number, box


def _with_shares(number: int, rows: int, blocks: Iterator[Box]) -> Iterator[tuple[float, int, Box]]:
    for box in blocks:
        yield share(box.row0, rows), number, box


def units(plan: OutputPlan, extents: Mapping[tuple[str, Key], Span]) -> list[list[Key]]:
    """The tensors of a plan: each one alone, or with those that it is moved in step with.

    extents: the range from the first to the last byte of a tensor in a file. Two tensors are moved in step if they share
    an output tensor, and their ranges in its file overlap.
    """
    members: dict[Key, list[Key]] = {
        key: [key] for key, places in plan.placements.items() if places
    }
    for (file, _, _), keys in _shared(plan).items():
        for key, other in _overlapping(keys, {key: extents[file, key] for key in keys}):
            joined, added = members[key], members[other]
            if joined is not added:
                joined += added
                members.update(dict.fromkeys(added, joined))
    return list({id(found): found for found in members.values()}.values())


def _shared(plan: OutputPlan) -> dict[tuple[str, str, int], list[Key]]:
    """The tensors of each output tensor, (file, record, offset), whose rows several tensors fill."""
    found: dict[tuple[str, str, int], list[Key]] = {}
    for key, places in plan.placements.items():
        for place in places:
            # A transposed tensor fills a column of every row: its blocks are nowhere complete, in whatever order.
            if not any(region.transposed for region in place.regions):
                found.setdefault((place.file, place.record, place.offset), []).append(key)
    return {where: keys for where, keys in found.items() if len(keys) > 1}


def _overlapping(keys: Collection[Key], extents: Mapping[Key, Span]) -> Iterator[tuple[Key, Key]]:
    """Yield pairs of tensors whose ranges overlap, so that chains of pairs connect all that do."""
    furthest = 0
    for key, other in pairwise(sorted(keys, key=lambda key: extents[key])):
        furthest = max(furthest, extents[key][1])
        if extents[other][0] < furthest:
            yield key, other
