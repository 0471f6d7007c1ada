"""Shares a planned output out: whole files, and the hash of each tensor, to the ranks of a conversion on several machines.

Files stay in the plan's order, which is that of the model, so that the shards of one tensor mostly fall to one rank
and is read once. A fingerprint needs all of a tensor: it falls to one rank, which reads the rest of that tensor too.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.output import FileLayout
from formats.tensor import ITEMSIZE
from megaconv.engine.plan import OutputPlan, Placement, needed_boxes
from megaconv.errors import TensorMismatch
from megaconv.model.ir import Key, TensorInfo


@dataclass(frozen=True)
class Share:
    """What one rank does."""

    plan: OutputPlan
    """Its files, and what goes into them."""
    hashed: tuple[Key, ...]
    """Tensors whose fingerprints it makes, in the manifest's order."""


def share_out(plan: OutputPlan, manifest: Mapping[Key, TensorInfo], ranks: int) -> list[Share]:
    """One share a rank, the same wherever it is computed. Every file is in one of them, and every tensor's hash too.

    Raises TensorMismatch when the plan has no place for a tensor.
    """
    for key in manifest:
        if not plan.placements.get(key):
            raise TensorMismatch(f"{key}: the output has no place for it; please report this")
    if ranks == 1:
        return [Share(plan, tuple(manifest))]
    owners = _owners(plan.files, ranks)
    plans = [_part(plan, {name for name in plan.files if owners[name] == rank}) for rank in range(ranks)]
    hashers = _hashers(plans, manifest)
    return [Share(part, tuple(key for key in manifest if hashers[key] == rank)) for rank, part in enumerate(plans)]


def _owners(files: Mapping[str, FileLayout], ranks: int) -> dict[str, int]:
    """The rank of each file. Each has a run of files, and the longest of these runs is as short as it can be."""

    def runs(capacity: int) -> dict[str, int]:
        owners, rank, filled = {}, 0, 0
        for name, layout in files.items():
            if filled and filled + layout.size > capacity:
                rank, filled = rank + 1, 0
            owners[name] = rank
            filled += layout.size
        return owners

    sizes = [layout.size for layout in files.values()]
    capacities = range(max(sizes), sum(sizes) + 1)
    return runs(capacities[bisect_left(capacities, True, key=lambda capacity: max(runs(capacity).values()) < ranks)])


def _part(plan: OutputPlan, names: set[str]) -> OutputPlan:
    """These files of a plan."""
    mine = {key: [place for place in places if place.file in names] for key, places in plan.placements.items()}
    return OutputPlan(
        {name: layout for name, layout in plan.files.items() if name in names},
        {key: places for key, places in mine.items() if places},
        [zero for zero in plan.zeros if zero[0] in names],
    )


def _hashers(plans: Sequence[OutputPlan], manifest: Mapping[Key, TensorInfo]) -> dict[Key, int]:
    """The rank that makes each tensor's fingerprint: of those with little to do the one that reads most of it anyway."""
    needed = [{key: _bytes(places, manifest[key].dtype) for key, places in plan.placements.items()} for plan in plans]
    load = [sum(needs.values()) for needs in needed]
    hashers = {}
    for key in sorted(manifest, key=lambda key: -manifest[key].nbytes):
        loads = [load[rank] + manifest[key].nbytes - needs.get(key, 0) for rank, needs in enumerate(needed)]
        rank = loads.index(min(loads))
        load[rank], hashers[key] = loads[rank], rank
    return hashers


def _bytes(places: Sequence[Placement], dtype: str) -> int:
    return sum(box.rows * box.cols for box in needed_boxes(places)) * ITEMSIZE[dtype]
