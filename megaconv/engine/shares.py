"""Divides a planned output among the ranks of a conversion on several machines: files, and the hash of each tensor.

Files stay in the plan's order, which is the order of the model. The shards of one tensor then mostly belong to one
rank, which reads the tensor once. A fingerprint needs the whole tensor: one rank computes it, and reads the rest of the
tensor too.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.output import FileLayout
from formats.tensor import ITEMSIZE
from megaconv.engine.plan import OutputPlan, Placement, needed_boxes
from megaconv.model.ir import Key, TensorInfo


@dataclass(frozen=True)
class Share:
    """The work of one rank."""

    plan: OutputPlan
    """The plan of its files."""
    hashed: tuple[Key, ...]
    """The tensors whose fingerprints the rank computes, in the manifest's order."""


def share_out(plan: OutputPlan, manifest: Mapping[Key, TensorInfo], ranks: int) -> list[Share]:
    """One share per rank, equal on every machine. Every file and every tensor's hash belongs to exactly one share."""
    if ranks == 1:
        return [Share(plan, tuple(manifest))]
    owners = _owners(plan.files, ranks)
    plans = []
    for rank in range(ranks):
        files = {name for name in plan.files if owners[name] == rank}
        plans.append(_part(plan, files))
    hashers = _hashers(plans, manifest)
    return [
        Share(part, tuple(key for key in manifest if hashers[key] == rank))
        for rank, part in enumerate(plans)
    ]


def _owners(files: Mapping[str, FileLayout], ranks: int) -> dict[str, int]:
    """The rank of each file. A rank has consecutive files; the largest share is as small as possible."""
    sizes = {name: layout.size for name, layout in files.items()}
    least, most = max(sizes.values()), sum(sizes.values())

    def suffices(capacity: int) -> bool:
        return max(_filled_up(sizes, capacity).values()) < ranks

    # Bisect for the smallest capacity with which the files need no more ranks than there are.
    capacity = least + bisect_left(range(least, most + 1), True, key=suffices)
    return _filled_up(sizes, capacity)


def _filled_up(sizes: Mapping[str, int], capacity: int) -> dict[str, int]:
    """The rank of each file if each rank takes files in order until the next one exceeds its capacity in bytes."""
    owners: dict[str, int] = {}
    rank = filled = 0
    for name, size in sizes.items():
        if filled and filled + size > capacity:
            rank += 1
            filled = 0
        owners[name] = rank
        filled += size
    return owners


def _part(plan: OutputPlan, names: set[str]) -> OutputPlan:
    """The plan restricted to these files."""
    placements: dict[Key, list[Placement]] = {}
    for key, places in plan.placements.items():
        mine = [place for place in places if place.file in names]
        if mine:
            placements[key] = mine
    files = {name: layout for name, layout in plan.files.items() if name in names}
    zeros = [zero for zero in plan.zeros if zero[0] in names]
    return OutputPlan(files, placements, zeros)


def _hashers(plans: Sequence[OutputPlan], manifest: Mapping[Key, TensorInfo]) -> dict[Key, int]:
    """The rank that computes each tensor's fingerprint.

    It is the rank that would then have the least to read; a rank that needs the tensor anyway reads only the rest of
    it.
    """
    needed = [_needed_bytes(plan, manifest) for plan in plans]
    load = [sum(needs.values()) for needs in needed]
    hashers: dict[Key, int] = {}
    for key in sorted(manifest, key=lambda key: -manifest[key].nbytes):
        nbytes = manifest[key].nbytes
        loads = [
            before + nbytes - needs.get(key, 0) for before, needs in zip(load, needed, strict=True)
        ]
        least = min(loads)
        rank = loads.index(least)
        hashers[key] = rank
        load[rank] = least
    return hashers


def _needed_bytes(plan: OutputPlan, manifest: Mapping[Key, TensorInfo]) -> dict[Key, int]:
    """The bytes of each tensor that a plan needs."""
    return {key: _bytes(places, manifest[key].dtype) for key, places in plan.placements.items()}


def _bytes(places: Sequence[Placement], dtype: str) -> int:
    return sum(box.rows * box.cols for box in needed_boxes(places)) * ITEMSIZE[dtype]
