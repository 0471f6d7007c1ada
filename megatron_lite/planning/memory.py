"""Memory of each pipeline stage's ranks: parameters, gradients, optimizer, and activations kept for the backward passes.

The table lists the elements that a token leaves in a layer, in the model's dtype. h is the width; q and kv are the
widths of all heads together; f is the MLP's width. Each is divided by tp, but h only with sequence parallelism:

    attention   h (its input) + h (normed) + (q + 2 kv) (the fused product) + q and, rotated by rope, kv (input of attention) + q (output)
    latent      h + h + ranks of q and kv + q + its k and v + output
    MLP         h + h + f (2 f if gated) + f (activated)
    experts     k times (2 h + f or 2 f + f), and h twice; if etp ranks share each expert, they have the rows of all of these,
                h once more for each, and f / etp of them
    cross       h + h + q (of queries) + q (output), and for each token of the encoder k and v
    head        h twice, and once the gradient of its matrix; the same and a layer more for each further predicted token;
                three h more for BERT's transform

Selective recomputation leaves out the normed and activated elements. Full recomputation keeps one h for each group of
layers, and the inside of one group.

Optimizer state depends on the kind: AdamW keeps two moments, SGD its momentum. Muon keeps one momentum for its matrices
and AdamW's state for all else. A distributed optimizer assigns whole Muon matrices; the rank with the most is counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.families import family
from megaconv.model.layout import Chunk
from megaconv.model.memory import bytes_per_parameter
from megaconv.model.rank_share import RankShare, rank_shares
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.optimizer.algorithm import Algorithm
from megatron_lite.optimizer.algorithms import algorithm
from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import Filling, fill
from megatron_lite.parallel.pipeline_order import order
from megatron_lite.planning.sharding import passing_bytes
from megatron_lite.planning.stages import Described, StackPart


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
    shares = rank_shares(family(run.config.family).rows, run.config, layout, run.vocab_rows)
    found = []
    for pp_rank, share in enumerate(shares):
        kept = sum(held.parameters * _bytes_each(run, held) for held in _held(run, pp_rank, share))
        memory = Memory(
            share.parameters, round(kept), activations(run, pp_rank), passing_bytes(run, pp_rank)
        )
        found.append(memory)
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
        yield Held(share.dense, run.replicas, chosen)
        yield Held(share.experts, run.expert_dp, chosen)
        return
    taken = _taken(run, pp_rank, chosen)
    dense, experts = ("replicas", share.dense, run.replicas), ("edp", share.experts, run.expert_dp)
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
    sizes = {"replicas": run.replicas, "edp": run.expert_dp}
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
    for index, chunk in enumerate(run.chunks(pp_rank)):
        trained = [info for info in run.parameters(index, chunk) if info.trained]
        for filling in fill(trained, run.optimizer.bucket_elements, dealer.deals):
            if filling.whole:
                yield filling


def _bytes_each(run: Described, held: Held) -> float:
    # This trainer's gradients are float32 in fp16 too, so fp16 needs the bytes that Megatron needs for bf16.
    dtype = "float32" if run.options.dtype == "float32" else "bfloat16"
    states = len(held.optimizer.state)
    return bytes_per_parameter(
        dtype,
        held.ranks,
        distributed_optimizer=run.optimizer.distributed,
        states=states,
        sharding=run.optimizer.sharding if run.replicas > 1 else "optim",
    )


def activations(run: Described, pp_rank: int) -> int:
    """Return the most that a rank of this stage keeps, over the passes that are in progress at one time."""
    layout = run.sizes.layout
    chunks = run.chunks(pp_rank)
    each = [_kept_by(run, chunk) for chunk in chunks]
    most = now = 0
    for action in order(layout.pp, layout.vpp, run.microbatches, pp_rank):
        now += -each[action.chunk] if action.backward else each[action.chunk]
        most = max(most, now)
    return most + max((_inside(run, chunk) for chunk in chunks), default=0)


def _kept_by(run: Described, chunk: Chunk) -> int:
    """Return the bytes that a forward pass of one microbatch through a chunk keeps until its backward pass."""
    width = _width(run)
    found = 0.0
    for part in run.stacks(chunk):
        for group, only_input in _groups(run, part.layers):
            found += width * part.tokens if only_input else _of_layers(run, part, group)
    if chunk.is_last:
        config = run.config
        # The gradient of the head's matrix.
        vocab = run.vocab_rows // run.sizes.layout.tp
        matrix = vocab * config.hidden
        of_head = 2 * width * run.tokens + matrix
        last_layer = layer_elements(run, config.layer_count - 1)
        of_mtp_layer = (last_layer + 3 * width) * run.tokens
        found += of_head + config.mtp_layers * (of_head + of_mtp_layer)
        if config.has("transform"):
            found += 3 * width * run.tokens
    return round(found * run.itemsize)


def _of_layers(run: Described, part: StackPart, layers: range) -> float:
    """Return the elements that a microbatch leaves in some layers of a part."""
    each = sum(layer_elements(run, layer) for layer in layers) * part.tokens
    return each + (len(layers) * _cross_elements(run) if part.crosses else 0)


def _cross_elements(run: Described) -> float:
    """Return the elements that a microbatch leaves in a layer's attention to the encoder's output."""
    attention, tp = run.config.attention, run.sizes.layout.tp
    width = attention.heads * attention.head_dim / tp
    normed = 0 if run.options.recompute.granularity == "selective" else _width(run)
    queries = run.tokens * (_width(run) + normed + 2 * width)
    return queries + run.source_tokens * 2 * width


def _groups(run: Described, layers: range) -> Iterator[tuple[range, bool]]:
    """Yield (layers, True if only the input of the group is kept)."""
    recompute = run.options.recompute
    first, end = layers.start, layers.stop
    if recompute.granularity != "full":
        yield range(first, end), False
    elif recompute.method == "uniform":
        for start in range(first, end, recompute.layers):
            yield range(start, min(start + recompute.layers, end)), True
    else:
        recomputed_end = min(first + recompute.layers, end)
        for layer in range(first, recomputed_end):
            yield range(layer, layer + 1), True
        yield range(recomputed_end, end), False


def _inside(run: Described, chunk: Chunk) -> int:
    """Return the bytes inside the largest group of layers that is recomputed."""
    inside = (
        _of_layers(run, part, group)
        for part in run.stacks(chunk)
        for group, whole in _groups(run, part.layers)
        if whole
    )
    return round(max(inside, default=0.0) * run.itemsize)


def _width(run: Described) -> float:
    """Return the elements of a token between layers."""
    return run.config.hidden / (run.sizes.layout.tp if run.sequence else 1)


def layer_elements(run: Described, layer: int) -> float:
    """Return the elements that a token leaves in a layer on this rank."""
    config, tp = run.config, run.sizes.layout.tp
    kind, gates = config.layers[layer], 2 if config.mlp.gated else 1
    selective = run.options.recompute.granularity == "selective"
    keeps_normed = config.norm.place != "after" and not selective
    normed = _width(run) if keeps_normed else 0.0
    found = 0.0
    mixer = mixer_of(config, kind)
    if mixer is not None:
        # If several matrices use a norm's output, it is kept.
        into = _width(run) if mixer.needs_norm else normed
        found = _width(run) + into + mixer.elements(config, kind) / tp
        if run.sizes.cp > 1 and run.options.context in ("a2a", "a2a+p2p"):
            # v and attention's output are kept before and after their exchange.
            found += (
                config.attention.head_dim
                * (config.attention.heads + config.attention.kv_heads)
                / tp
            )
    if kind.mlp == "dense":
        activated = (
            0 if gates == 1 or config.mlp.is_plain_swiglu else 1
        )  # functions other than SwiGLU also keep the activated gates
        made = 0 if selective else 1
        found += _width(run) + normed + config.mlp.ffn * (gates + activated + made) / tp
    elif kind.mlp == "experts":
        experts, here = config.experts, tp if run.sequence else 1
        rows = config.hidden * (1 + run.sizes.layout.etp)
        routed = experts.per_token * (rows + experts.ffn * (gates + 1)) / here
        shared = experts.shared_ffn * (gates + 1) / tp + (_width(run) if experts.shared_gate else 0)
        found += 2 * _width(run) + routed + shared
    return found + (2 * _width(run) if config.norm.place in ("both", "after") else 0)
