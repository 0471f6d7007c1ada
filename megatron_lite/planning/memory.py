"""Bytes of each pipeline stage's ranks: parameters, gradients, optimizer; and what forward passes keep for the backward ones.

Elements that a token leaves behind in a layer, in the model's dtype (h width, q and kv all heads' widths, f the MLP's; each
divided by tp but for h, which sequence parallelism divides):

    attention   h (its input) + h (normed) + (q + 2 kv) (the fused product) + q and, turned by rope, kv (what attention gets) + q (out)
    latent      h + h + ranks of q and kv + q + its k and v + out
    MLP         h + h + f (2 f where gated) + f (activated); of experts k times (2 h + f or 2 f + f), and h twice; where etp ranks
                share each, they have the rows of all of these, h once more for each, and f / etp of them
    head        h twice, and once the gradient of its matrix; the same and a layer more for each further token that is predicted

Selective recomputation leaves normed and activated out; full keeps one h for each group of layers, and one group's inside.

Of optimizer state each kind is counted with what it keeps: AdamW two moments, SGD its momentum, Muon one of its matrices and AdamW's of
all else. Muon's matrices, which a distributed optimizer deals out whole, are those of the rank that gets most.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.model.memory import bytes_per_parameter
from megaconv.model.rank_share import RankShare, rank_shares
from megatron_lite.models.mlp import is_plain_swiglu
from megatron_lite.parallel.buckets import fill
from megatron_lite.parallel.dealing import Dealer
from megatron_lite.parallel.muon import takes
from megatron_lite.parallel.pipeline import order
from megatron_lite.parallel.zero import STATE
from megatron_lite.planning.stages import Described


@dataclass(frozen=True)
class Memory:
    """Of every rank of one pipeline stage, in bytes."""

    parameters: int
    """How many, not bytes."""
    kept: int
    """Parameters, gradients, optimizer state."""
    activations: int
    """The most that forward passes keep at one time."""

    @property
    def total(self) -> int:
        return self.kept + self.activations


def stage_memory(run: Described) -> list[Memory]:
    """One for each pipeline rank."""
    layout = run.sizes.layout
    shares = rank_shares(family(run.config.family).rows, run.config, layout, run.vocab_rows)
    found = []
    for pp_rank, share in enumerate(shares):
        kept = sum(held.parameters * _bytes_each(run, held) for held in _held(run, pp_rank, share))
        found.append(Memory(share.parameters, round(kept), activations(run, pp_rank)))
    return found


class Held(NamedTuple):
    """Parameters of a rank that are kept alike."""

    parameters: int
    ranks: float
    """That share their masters and state where the optimizer is distributed; less than there are where the shares are uneven."""
    kind: str
    """What updates them, as in OptimizerOptions."""


def _held(run: Described, pp_rank: int, share: RankShare) -> Iterator[Held]:
    matrices = _matrices(run, pp_rank) if run.optimizer.kind == "muon" else {}
    other = "adamw" if run.optimizer.kind == "muon" else run.optimizer.kind
    for axis, parameters, ranks in (("replicas", share.dense, run.replicas), ("edp", share.experts, run.expert_dp)):
        if axis not in matrices:
            yield Held(parameters, ranks, other)
            continue
        each = matrices[axis]
        yield Held(parameters - sum(each), ranks, other)
        yield Held(sum(each), sum(each) / max(each), "muon")


def _matrices(run: Described, pp_rank: int) -> dict[str, list[int]]:
    """By the axis along which they are dealt out: elements of Muon's matrices that each of its ranks gets."""
    dealer, ranks = Dealer(), {"replicas": run.replicas, "edp": run.expert_dp}
    found: dict[str, list[int]] = {}
    for index, chunk in enumerate(run.chunks(pp_rank)):
        trained = [info for info in run.parameters(index, chunk) if info.trained]
        for members, _ in fill(trained, run.optimizer.bucket_elements, deals=True):
            if takes(members[0].info):
                axis = members[0].info.reduced_over
                counts = [member.end - member.start for member in members]
                held = found.setdefault(axis, [0] * ranks[axis])
                for owner, count in zip(dealer.owners(counts, axis, ranks[axis]), counts, strict=True):
                    held[owner] += count
    return found


def _bytes_each(run: Described, held: Held) -> float:
    # Gradients are float32 here in fp16 as well, so that fp16 takes what Megatron has for bf16.
    dtype = "float32" if run.options.dtype == "float32" else "bfloat16"
    states = len(STATE[held.kind])
    return bytes_per_parameter(dtype, held.ranks, distributed_optimizer=run.optimizer.distributed, states=states)


def activations(run: Described, pp_rank: int) -> int:
    """The most that a rank of this stage keeps: of the passes that its schedule has under way at one time."""
    layout = run.sizes.layout
    chunks = run.chunks(pp_rank)
    each = [_kept_by(run, chunk) for chunk in chunks]
    most = now = 0
    for action in order(layout.pp, layout.vpp, run.microbatches, pp_rank):
        now += -each[action.chunk] if action.backward else each[action.chunk]
        most = max(most, now)
    return most + max((_inside(run, chunk) for chunk in chunks), default=0)


def _kept_by(run: Described, chunk: Chunk) -> int:
    """A forward pass of one microbatch through a chunk, until its backward pass."""
    tokens, elements = run.tokens, 0.0
    for group, whole in _groups(run, chunk):
        elements += _width(run) if whole else sum(layer_elements(run, layer) for layer in group)
    found = elements * tokens * run.itemsize
    if chunk.is_last:
        further, tp = run.config.mtp_layers, run.sizes.layout.tp
        matrix = run.vocab_rows // tp * run.config.hidden
        predicted = further * (layer_elements(run, run.config.layer_count - 1) + 3 * _width(run)) * tokens
        found += ((2 * _width(run) * tokens + matrix) * (1 + further) + predicted) * run.itemsize
    return round(found)


def _groups(run: Described, chunk: Chunk) -> Iterator[tuple[range, bool]]:
    """(layers, whether only what goes into them is kept)."""
    again, end = run.options.recompute, chunk.first_layer + chunk.layers
    if again.granularity != "full":
        yield range(chunk.first_layer, end), False
    elif again.method == "uniform":
        for first in range(chunk.first_layer, end, again.layers):
            yield range(first, min(first + again.layers, end)), True
    else:
        for layer in range(chunk.first_layer, min(chunk.first_layer + again.layers, end)):
            yield range(layer, layer + 1), True
        yield range(min(chunk.first_layer + again.layers, end), end), False


def _inside(run: Described, chunk: Chunk) -> int:
    """Of the largest group of layers that is computed again."""
    tokens = run.tokens * run.itemsize
    inside = (sum(layer_elements(run, layer) for layer in group) for group, whole in _groups(run, chunk) if whole)
    return round(max(inside, default=0.0) * tokens)


def _width(run: Described) -> float:
    """Elements of a token between layers."""
    return run.config.hidden / (run.sizes.layout.tp if run.sequence else 1)


def layer_elements(run: Described, layer: int) -> float:
    """That a token leaves behind in a layer on this rank."""
    config, tp = run.config, run.sizes.layout.tp
    kind, gates = config.layers[layer], 2 if config.mlp.gated else 1
    selective = run.options.recompute.granularity == "selective"
    normed = 0.0 if selective else _width(run)
    found = 0.0
    if kind.mixer != "none":
        into = _width(run) if config.latent.kv_rank else normed  # what is normed for several matrices is kept
        found = _width(run) + into + _mixed(config, kind.mixer, rotates=kind.rotates) / tp
        if run.sizes.cp > 1 and run.options.context in (
            "a2a",
            "a2a+p2p",
        ):  # v, and what comes of attention, before and after their exchange
            found += config.attention.head_dim * (config.attention.heads + config.attention.kv_heads) / tp
    if kind.mlp == "dense":
        activated = (
            0 if gates == 1 or is_plain_swiglu(config.mlp) else 1
        )  # gates, which other functions keep beside their input
        made = 0 if selective else 1
        found += _width(run) + normed + config.mlp.ffn * (gates + activated + made) / tp
    elif kind.mlp == "experts":
        experts, here = config.experts, tp if run.sequence else 1
        rows = config.hidden * (1 + run.sizes.layout.etp)
        routed = experts.per_token * (rows + experts.ffn * (gates + 1)) / here
        shared = experts.shared_ffn * (gates + 1) / tp + (_width(run) if experts.shared_gate else 0)
        found += 2 * _width(run) + routed + shared
    return found + (2 * _width(run) if config.norm.place == "both" else 0)


def _mixed(config: ModelConfig, mixer: str, *, rotates: bool) -> float:
    """Elements of a token in a whole mixer, beside its input."""
    attention, latent = config.attention, config.latent
    if mixer == "linear":
        linear = config.linear
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        return 2 * (2 * keys + values) + 2 * values
    if mixer == "mamba":
        mamba = config.mamba
        inner, states = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
        return 2 * (inner + states) + 2 * inner
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if latent.kv_rank:
        values = attention.heads * latent.v_dim
        return 2 * q + q + values + latent.q_rank + latent.kv_rank + latent.rope_dim + values
    turned = kv if rotates and config.positions.kind == "rope" else 0
    return (q + 2 * kv) + q + turned + q
