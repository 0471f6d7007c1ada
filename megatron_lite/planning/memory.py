"""Memory of each pipeline stage's ranks: parameters, gradients, optimizer state and activations (megaconv/planning/activations.py).

Optimizer state depends on the kind: AdamW keeps two moments, SGD its momentum. Muon keeps one momentum for its matrices
and AdamW's state for all else. A distributed optimizer assigns whole Muon matrices; the rank with the most is counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from formats.tensor import ITEMSIZE
from megaconv.model.memory import FLOAT32, shares_per_parameter
from megaconv.model.rank_share import RankShare
from megaconv.planning.activations import activations
from megatron_lite.objectives.image_models import reads_images
from megatron_lite.optimizer.algorithm import Algorithm, state_bytes, widened_bytes
from megatron_lite.optimizer.algorithms import algorithm
from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import Filling, fill
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.planning.generation import cache_bytes
from megatron_lite.planning.sharding import passing_bytes
from megatron_lite.planning.stages import Described


@dataclass(frozen=True)
class Memory:
    """Memory of every rank of one pipeline stage, in bytes."""

    parameters: int
    """Number of parameters, not bytes."""
    kept: int
    """Parameters, gradients and optimizer state. Frozen weights have neither of the two."""
    activations: int
    """The most that forward passes keep at one time."""
    widened: int = 0
    """float32 copies of gradients and moments in bf16, a block at a time, for the update."""
    passing: int = 0
    """Gradients and parameters that exist for a time, if data-parallel ranks shard them."""
    adapters: int = 0
    """Number of parameters of adapters and of trained rows of single tokens, which `parameters` leaves out."""
    whole: int = 0
    """Number of parameters that are trained whole beside adapters."""
    reference: int = 0
    """Weights of a reference model."""
    teacher: int = 0
    """Weights of a teacher, and the input of its head for all microbatches of a step."""
    encoders: int = 0
    """Weights of the encoders of images, of the model and of its teacher."""
    generation: int = 0
    """The cache of completions, and the weights that are gathered meanwhile. It is freed before the passes of training."""

    @property
    def total(self) -> int:
        training = self.activations + self.passing
        lasting = self.kept + self.widened + self.reference + self.teacher + self.encoders
        return lasting + max(training, self.generation)


def stage_memory(run: Described) -> list[Memory]:
    """Return one Memory for each pipeline rank."""
    found = []
    for pp_rank in range(run.sizes.layout.pp):
        share = _share(run, pp_rank)
        adapters, trained = _adapters(run, pp_rank), _trained(run, pp_rank, share)
        held = list(_held(run, pp_rank, trained))
        kept = sum(each.parameters * _bytes_each(run, each) for each in held)
        whole = trained.parameters - adapters
        if run.run.frozen:
            # Beside adapters, some modules are trained whole.
            kept += _frozen_bytes(run, share.dense - whole, share.experts)
        else:
            kept += _frozen_bytes(run, share.dense - trained.dense, share.experts - trained.experts)
        one = Memory(
            parameters=share.parameters,
            kept=round(kept),
            widened=_widened_bytes(run, held),
            activations=activations(run.run, pp_rank),
            passing=passing_bytes(run, pp_rank),
            adapters=adapters,
            whole=whole if run.run.frozen else 0,
            reference=_of_reference(run, share, whole) * run.run.itemsize,
            teacher=_of_teacher(run, pp_rank),
            encoders=sum(_of_encoder(each, pp_rank) for each in (run, run.teacher) if each),
            generation=_generation(run, pp_rank, share),
        )
        found.append(one)
    return found


def _of_reference(run: Described, share: RankShare, whole: int) -> int:
    """Return the parameters of the reference model on a rank. whole: those that are trained whole beside adapters."""
    if run.work.reference:
        return share.parameters
    return whole if run.work.keeps_base else 0


def _of_teacher(run: Described, pp_rank: int) -> int:
    """Return the bytes of a teacher on a rank; 0 without one."""
    if run.teacher is None:
        return 0
    teacher = run.teacher.run
    elements = _share(run.teacher, pp_rank).parameters
    if pp_rank == teacher.layout.pp - 1:
        ranks = teacher.layout.tp if teacher.sequence_parallel else 1
        tokens = teacher.microbatches * teacher.micro_batch * teacher.seq // teacher.cp
        elements += tokens // ranks * teacher.config.hidden
    return elements * teacher.itemsize


def _of_encoder(run: Described, pp_rank: int) -> int:
    """Return the bytes of the encoder of images on a rank; 0 without one, and if its size is unknown."""
    encoder, chunks = run.encoder, run.run.chunks(pp_rank)
    if encoder is None:
        return 0
    predicts = run.options.trains and run.run.mtp_layers > 0
    needed = reads_images(chunks, encoder.layers, predicts=predicts)
    return (encoder.parameters or 0) * run.run.itemsize if needed else 0


def _share(run: Described, pp_rank: int) -> RankShare:
    """Return the parameters of the model on a rank. Megatron core may hold a further copy of an embedding."""
    chunks = enumerate(run.run.chunks(pp_rank))
    return _sum_of(info for index, chunk in chunks for info in run.parameters(index, chunk))


def _sum_of(infos: Iterable[ParameterInfo]) -> RankShare:
    """Return the elements of parameters."""
    dense = experts = 0
    for info in infos:
        count = prod(info.native.shape)
        if info.kind is Kind.EXPERT:
            experts += count
        else:
            dense += count
    return RankShare(dense, experts)


def _generation(run: Described, pp_rank: int, share: RankShare) -> int:
    """Return the bytes that exist while completions are generated."""
    if not run.work.completion:
        return 0
    whole = share.parameters * run.run.itemsize if _shards_parameters(run) else 0
    return cache_bytes(run, pp_rank) + whole


def _shards_parameters(run: Described) -> bool:
    return run.optimizer.shards_parameters and run.run.replicas > 1


def _trained(run: Described, pp_rank: int, share: RankShare) -> RankShare:
    """Return the parameters of a rank that have gradients. share: the model's parameters on the rank."""
    chunks = list(enumerate(run.run.chunks(pp_rank)))
    if run.run.frozen:
        return _sum_of(info for index, chunk in chunks for info in run.trained(index, chunk))
    resting = _sum_of(
        info for index, chunk in chunks for info in run.parameters(index, chunk) if info.rests
    )
    return RankShare(share.dense - resting.dense, share.experts - resting.experts)


def _adapters(run: Described, pp_rank: int) -> int:
    """Return the number of parameters of a rank's adapters, with the trained rows of single tokens."""
    chunks = enumerate(run.run.chunks(pp_rank))
    infos = (info for index, chunk in chunks for info in run.beside(index, chunk))
    return sum(prod(info.native.shape) for info in infos)


def _frozen_bytes(run: Described, dense: int, experts: int) -> float:
    """Return the bytes of parameters that keep their values. Some strategies shard them beside adapters."""
    held: float = dense + experts
    if _shards_parameters(run):
        held = dense / run.run.replicas + experts / run.run.expert_dp
    return held * run.run.itemsize


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


def _widened_bytes(run: Described, held: Iterable[Held]) -> int:
    """Return the bytes of the float32 memory of a rank's updates, of which each optimizer makes one."""
    elements: dict[Algorithm, float] = {}
    for each in held:
        ranks = each.ranks if run.optimizer.distributed else 1
        before = elements.get(each.optimizer, 0.0)
        elements[each.optimizer] = before + each.parameters / ranks
    return sum(
        widened_bytes(optimizer, run.optimizer, round(count))
        for optimizer, count in elements.items()
    )


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
    # Without --main-grads-dtype, this trainer's gradients are float32 in fp16 too, so fp16 needs the bytes that Megatron needs for bf16.
    dtype = "float32" if run.options.dtype == "float32" else "bfloat16"
    sharding = run.optimizer.sharding if run.run.replicas > 1 else "no_shard"
    shares = shares_per_parameter(
        dtype,
        held.ranks,
        sharding,
        states=len(held.optimizer.state),
        narrower=FLOAT32 * len(held.optimizer.state) - state_bytes(held.optimizer, run.optimizer),
        narrower_gradient=FLOAT32 - ITEMSIZE[run.optimizer.main_grads_dtype],
        keeps_sharded_weights=False,
    )
    return sum(shares)
