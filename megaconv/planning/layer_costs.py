"""The time and memory that a microbatch takes in one layer, or in the head, on one rank: seconds and bytes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megaconv.model.rank_share import RankShare
from megaconv.model.subjects import LayerKind
from megaconv.planning.activations import (
    head_elements,
    layer_elements,
    mtp_layer_elements,
    recomputes_mtp,
)
from megaconv.planning.collectives import SENT, Counted
from megaconv.planning.gpus import Gpu
from megaconv.planning.mixers import MixerCost, in_layer, mixer_cost
from megaconv.planning.rates import (
    ATTENTION,
    ELEMENTWISE,
    HALF_TILE,
    LINKS,
    MEMORY,
    PRODUCTS,
    PRODUCTS_FP8,
    TENSOR_EXPOSED,
    copies_share,
    exchange_seconds,
    link,
)
from megaconv.planning.recomputation import KEEP_ALL
from megaconv.planning.run import Run
from megaconv.planning.traffic import of_layer, of_scores, there_and_back

CAUSAL = 0.5
"""The share of the scores that a causal mask leaves."""
ATTENTION_BACKWARD = 2.5
"""Time of fused attention's backward pass over that of its forward pass: five products in place of two."""
LOGIT_BYTES = 4
"""Logits are float32."""


class Cost(NamedTuple):
    """Seconds and bytes of one microbatch, forward and backward."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    exchange: float = 0.0
    """Communication that no computation hides."""
    waiting: float = 0.0
    """Waiting for copies of offloaded activations."""
    kept: float = 0.0
    """Bytes that stay until the backward pass."""
    inside: float = 0.0
    """Bytes that exist while the layer is recomputed."""

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise + self.exchange + self.waiting


class Machine(NamedTuple):
    """The GPU and the way it is used."""

    gpu: Gpu
    fp8: bool = False
    """True if products with the layers' weights are FP8."""
    frozen: bool = False
    """True if weights have no gradients, because only adapters are trained."""

    @property
    def products(self) -> float:
        """Operations per second of products with the layers' weights."""
        share = PRODUCTS_FP8 if self.fp8 else PRODUCTS
        return self.gpu.peak(fp8=self.fp8) * share

    @property
    def plain_products(self) -> float:
        """Operations per second of products in bf16, such as the head's."""
        return self.gpu.bf16 * PRODUCTS

    @property
    def attention(self) -> float:
        return self.gpu.bf16 * ATTENTION

    @property
    def memory(self) -> float:
        """Bytes per second."""
        return self.gpu.bandwidth * MEMORY

    @property
    def passes(self) -> int:
        """Products with each weight: forward, for the input's gradient and for the weight's gradient."""
        return 2 if self.frozen else 3


def layer_cost(run: Run, kind: LayerKind, share: RankShare, machine: Machine) -> Cost:
    """Return the cost of a layer. share: its parameters on this rank."""
    again = run.recompute.granularity == "full"
    mixer = mixer_cost(run.config, kind)
    attention, backward = _attention_seconds(run, kind, mixer, machine)
    elements = layer_elements(run, kind) * run.tokens * run.itemsize
    moved = layer_elements(replace(run, recompute=KEEP_ALL), kind) * run.tokens * run.itemsize
    traffic = of_layer(run, kind, run.tokens, 2 if again else 1)
    forwards = 2 if again else 1
    products = _product_seconds(run, share, machine) * (machine.passes + again)
    products += _adapter_seconds(run, kind, machine) * (3 + again)
    of_attention = attention * forwards + backward
    return Cost(
        products=products,
        attention=of_attention,
        elementwise=_elementwise_seconds(run, moved, machine),
        exchange=_exchange_seconds(run, traffic, machine.gpu, of_attention, products),
        kept=run.width * run.tokens * run.itemsize if again else elements,
        inside=elements if again else 0.0,
    )


def forward_seconds(run: Run, kind: LayerKind, share: RankShare, machine: Machine) -> float:
    """Return the seconds of a forward pass alone, as in inference. share: the layer's parameters on this rank."""
    attention, _ = _attention_seconds(run, kind, mixer_cost(run.config, kind), machine)
    products = _product_seconds(run, share, machine)
    moved = layer_elements(run, kind) * run.tokens * run.itemsize
    elementwise = ELEMENTWISE * moved / machine.memory
    # Traffic is counted for both passes, which exchange the same bytes.
    exchanged = _exchange_seconds(run, of_layer(run, kind, run.tokens, 1), machine.gpu) / 2
    return products + attention + elementwise + exchanged


def head_forward_seconds(run: Run, machine: Machine) -> float:
    """Return the seconds of the head in a pass without gradients."""
    operations = 2 * run.tokens * run.config.hidden * run.logit_columns
    logits = run.tokens * run.logit_columns * LOGIT_BYTES
    return operations / machine.plain_products + 3 * logits / machine.memory


def head_cost(run: Run, inside: Sequence[tuple[LayerKind, RankShare]], machine: Machine) -> Cost:
    """Return the cost of the head, and of layers that predict further tokens.

    inside: kinds of the layers inside one of these, with their parameters on this rank.
    """
    config = run.config
    columns = run.computed_columns
    mtp = run.mtp_layers
    heads = 1 + mtp
    operations = 2 * run.tokens * config.hidden * columns * heads
    logits = run.tokens * columns * LOGIT_BYTES
    further = Cost()
    if mtp:
        costs = [layer_cost(run, kind, share, machine) for kind, share in inside]
        further = Cost(*(sum(values) for values in zip(*costs, strict=True)))
    traffic = (
        of_scores(run)
        if config.has("scores") or run.rests_head
        else there_and_back(run, run.tokens * heads, config.hidden)
    )
    passes = (3 if run.trains_head else machine.passes) + run.head_again
    # Half of the elementwise work belongs to the forward pass.
    moves = 6 + 3 * run.head_again
    return Cost(
        products=operations * passes / machine.plain_products + mtp * further.products,
        attention=mtp * further.attention,
        elementwise=moves * logits * heads / machine.memory + mtp * further.elementwise,
        exchange=_exchange_seconds(run, traffic, machine.gpu) + mtp * further.exchange,
        kept=head_elements(run) * run.itemsize,
        inside=mtp_layer_elements(run) * run.itemsize if recomputes_mtp(run) else 0.0,
    )


def _product_seconds(run: Run, share: RankShare, machine: Machine) -> float:
    """Return the seconds of one product of a microbatch's tokens with each of a layer's weights."""
    dense = 2.0 * run.tokens * share.dense / machine.products
    if not share.experts:
        return dense
    experts, layout = run.config.experts, run.layout
    own = run.routed_rows * layout.etp
    here = experts.count / layout.ep
    rows = own / here
    operations = 2.0 * own * share.experts / here
    # Few rows for each expert: tiles are partly empty, and reading the weights takes longer than multiplying.
    computing = operations / machine.products * (rows + HALF_TILE) / rows
    reading = share.experts * run.itemsize / machine.memory
    return dense + max(computing, reading)


def _adapter_seconds(run: Run, kind: LayerKind, machine: Machine) -> float:
    """Return the seconds of one product of a microbatch's tokens with each matrix of a layer's adapters."""
    found = run.adapters_of(kind)
    operations = 2.0 * run.tokens * found.dense
    if found.experts:
        here = run.config.experts.count / run.layout.ep
        operations += 2.0 * run.routed_rows * found.experts / here
    return operations / machine.plain_products


def _attention_seconds(
    run: Run, kind: LayerKind, mixer: MixerCost | None, machine: Machine
) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass of the mixer, without products with weights."""
    if mixer is None:
        return 0.0, 0.0
    visible = min(run.seq, kind.window or kind.chunk or run.seq)
    each = mixer.operations(in_layer(run.config, kind), visible) / 3
    operations = each * run.tokens / run.layout.tp
    if not mixer.attends:
        seconds = operations / machine.attention
        return seconds, 2 * seconds
    masked = visible == run.seq and not run.config.has("transform")
    seconds = operations * (CAUSAL if masked else 1.0) / machine.attention
    return seconds, ATTENTION_BACKWARD * seconds


def _elementwise_seconds(run: Run, elements: float, machine: Machine) -> float:
    """Return the seconds of reading and writing. elements: bytes that a layer keeps if nothing is recomputed."""
    forwards = {None: 1.0, "selective": 1.25, "full": 2.0}[run.recompute.granularity]
    return ELEMENTWISE * elements * (forwards + 2.0) / machine.memory


def _exchange_seconds(
    run: Run,
    traffic: Iterable[Counted],
    gpu: Gpu,
    attention: float = 0.0,
    products: float = 0.0,
) -> float:
    """Return the seconds of communication that nothing hides.

    A ring of context ranks runs behind attention, and the exchange of experts' tokens may run behind all computing.
    attention, products: seconds of these in the layer.
    """
    layout = run.layout
    found = ring = experts = 0.0
    for group, kind, count in traffic:
        if group == "tp" and layout.tp > 1:
            whole = _sent(kind, count, layout.tp) / link(gpu, layout.tp, 1)
            found += whole * TENSOR_EXPOSED
        elif group in ("cp", "cp_near", "cp_far") and run.cp > 1:
            ring += _sent(kind, count, run.cp) / link(gpu, run.cp, layout.tp)
        elif group == "ep" and layout.ep > 1:
            sent = _sent(kind, count, layout.ep)
            experts += exchange_seconds(gpu, sent, layout.ep, layout.etp, _copies(run))
        elif group == "etp" and layout.etp > 1:
            found += _sent(kind, count, layout.etp) / link(gpu, layout.etp, 1)
    if run.overlaps_experts:
        experts = max(0.0, experts - attention - products)
    return found + experts + max(0.0, ring - attention)


def _copies(run: Run) -> Callable[[int], float] | None:
    """Return copies_share of this model if the dispatcher sends a token to each node once, as DeepEP does."""
    experts = run.config.experts
    if run.dispatcher != "flex":
        return None
    return lambda nodes: copies_share(nodes, experts.per_token, experts.group_topk)


def _sent(kind: str, count: float, ranks: int) -> float:
    """Return the bytes that a rank sends."""
    return count if kind == "send" else count * SENT[kind] * (ranks - 1) / ranks


def message_seconds(run: Run, gpu: Gpu) -> float:
    """Return the seconds of a message between neighbouring stages."""
    whole = run.tokens * run.config.hidden * run.itemsize
    stride = run.layout.tp * run.replicas
    own = whole / run.layout.tp if run.sequence else whole
    return own / (gpu.nvlink if stride * 2 <= gpu.node else gpu.network) / LINKS
