"""Memory of each pipeline stage's ranks: parameters, gradients, optimizer state and activations (megaconv/planning/activations.py).

Optimizer state depends on the kind: AdamW keeps two moments, SGD its momentum. Muon keeps one momentum for its matrices
and AdamW's state for all else. A distributed optimizer assigns whole Muon matrices; the rank with the most is counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.families import family
from megaconv.model.memory import BYTES_PER_PARAMETER, bytes_per_parameter
from megaconv.model.rank_share import RankShare, rank_shares
from megaconv.planning.activations import activations
from megatron_lite.optimizer.algorithm import Algorithm
from megatron_lite.optimizer.algorithms import algorithm
from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import Filling, fill
from megatron_lite.planning.sharding import passing_bytes
from megatron_lite.planning.stages import Described


@dataclass(frozen=True)
class Memory:
    """Memory of every rank of one pipeline stage, in bytes."""

    parameters: int
    """Number of parameters, not bytes."""
    kept: int
    """Parameters, gradients and optimizer state."""
    activations: int
    """The most that forward passes keep at one time."""
    passing: int = 0
    """Gradients and parameters that exist for a time, if data-parallel ranks shard them."""

    @property
    def total(self) -> int:
        return self.kept + self.activations + self.passing


def stage_memory(run: Described) -> list[Memory]:
    """Return one Memory for each pipeline rank."""
    layout = run.sizes.layout
    shares = rank_shares(family(run.config.family).rows, run.config, layout, run.run.vocab_rows)
    found = []
    for pp_rank, share in enumerate(shares):
        kept = sum(held.parameters * _bytes_each(run, held) for held in _held(run, pp_rank, share))
        made = activations(run.run, pp_rank)
        found.append(Memory(share.parameters, round(kept), made, passing_bytes(run, pp_rank)))
    return found


class Held(NamedTuple):
    """Parameters of a rank with the same kind of state."""

    parameters: int
    ranks: float
    """Number of ranks that share masters and state with a distributed optimizer; smaller if the shares are uneven."""
    optimizer: Algorithm
    """The optimizer that updates them."""


def _held(run: Described, pp_rank: int, share: RankShare) -> Iterator[Held]:
    chosen = algorithm(run.optimizer)
    if chosen.rest is None:
        yield Held(share.dense, run.run.replicas, chosen)
        yield Held(share.experts, run.run.expert_dp, chosen)
        return
    taken = _taken(run, pp_rank, chosen)
    dense = ("replicas", share.dense, run.run.replicas)
    experts = ("edp", share.experts, run.run.expert_dp)
    for axis, parameters, ranks in (dense, experts):
        by_rank = taken.get(axis, [0])
        elements = sum(by_rank)
        yield Held(parameters - elements, ranks, chosen.rest)
        if elements:
            uneven = elements / max(by_rank)
            yield Held(elements, uneven if chosen.whole else ranks, chosen)


def _taken(run: Described, pp_rank: int, chosen: Algorithm) -> dict[str, list[int]]:
    """Return the elements that the optimizer does not leave to its rest, by the axis of the ranks.

    They are listed by rank, as if each parameter were assigned to one rank.
    """
    sizes = {"replicas": run.run.replicas, "edp": run.run.expert_dp}
    dealer = Dealer(chosen.takes)
    found: dict[str, list[int]] = {}
    for filling in _buckets_of_whole(run, pp_rank, dealer):
        axis = filling.axis
        counts = [member.end - member.start for member in filling.members]
        by_rank = found.setdefault(axis, [0] * sizes[axis])
        for owner, count in zip(dealer.owners(counts, axis, sizes[axis]), counts, strict=True):
            by_rank[owner] += count
    return found


def _buckets_of_whole(run: Described, pp_rank: int, dealer: Dealer) -> Iterator[Filling]:
    """Yield the buckets of parameters that are assigned to one rank as a whole."""
    for index, chunk in enumerate(run.run.chunks(pp_rank)):
        trained = [info for info in run.parameters(index, chunk) if info.trained]
        for filling in fill(trained, run.optimizer.bucket_elements, dealer.deals):
            if filling.whole:
                yield filling


def _bytes_each(run: Described, held: Held) -> float:
    # This trainer's gradients are float32 in fp16 too, so fp16 needs the bytes that Megatron needs for bf16.
    dtype = "float32" if run.options.dtype == "float32" else "bfloat16"
    states = len(held.optimizer.state)
    sharding = run.optimizer.sharding if run.run.replicas > 1 else "no_shard"
    each = bytes_per_parameter(dtype, held.ranks, sharding=sharding, states=states)
    # Sharded parameters are made from their float32 masters, and not kept beside them.
    without_weight = sharding == "optim_grads_params" and dtype != "float32"
    return each - BYTES_PER_PARAMETER[dtype].weight / held.ranks if without_weight else each
