"""The time of a pass that generates one token for each sequence, and of a prompt's pass: seconds.

Reading weights and the cache takes most of a token's time. A product takes the longer one of reading and computing.
LAUNCHES and SMALL_EXCHANGE are fitted to every second row of gpt-fast's table of tensor parallelism on A100
(`python -m benchmarks.serving`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from megaconv.model.rank_share import RankShare
from megaconv.model.subjects import LayerKind
from megaconv.planning.cache import cache_bytes, reach
from megaconv.planning.layer_costs import Machine, forward_seconds
from megaconv.planning.mixers import in_layer, mixer_word
from megaconv.planning.mlps import routed_width
from megaconv.planning.rates import LINKS, exchange_seconds, link
from megaconv.planning.serving import Serving

LAUNCHES = 20e-6
"""Seconds that a layer's kernels take to start and to end, however small they are."""
SMALL_EXCHANGE = 20e-6
"""Seconds that an exchange takes, however small it is."""


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """The terms of the time of a token, in seconds."""

    compute: float = 0.0
    """Products and attention that take longer to compute than to read."""
    memory: float = 0.0
    """Reading weights and the cache."""
    communication: float = 0.0
    launches: float = 0.0
    """Starting kernels."""
    bubble: float = 0.0
    """Idle time of the pipeline, because its stages are unequal."""

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Return the terms by name."""
        return {term.name: float(getattr(self, term.name)) for term in fields(self)}


def together(times: Iterable[TokenTime]) -> TokenTime:
    """Return the sum."""
    sums: dict[str, float] = {}
    for time in times:
        for term, seconds in time.terms().items():
            sums[term] = sums.get(term, 0.0) + seconds
    return TokenTime(**sums)


def layer_time(serving: Serving, kind: LayerKind, share: RankShare, machine: Machine) -> TokenTime:
    """Return the time of a layer in one pass. share: its parameters on this rank."""
    weights = _weights_time(serving, share, machine)
    attention = _attention_time(serving, kind, machine)
    exchanges = _exchange_seconds(serving, kind, machine)
    rest = TokenTime(communication=exchanges, launches=LAUNCHES)
    return together((weights, attention, rest))


def head_time(serving: Serving, parameters: int, machine: Machine) -> TokenTime:
    """Return the time of the head in one pass. parameters: of the head on this rank."""
    reading = parameters * serving.itemsize / machine.memory
    computing = 2.0 * serving.passing * parameters / machine.plain_products
    return _longer(computing, reading)


def _longer(computing: float, reading: float) -> TokenTime:
    """Return the longer one: both run at the same time."""
    return TokenTime(compute=computing) if computing > reading else TokenTime(memory=reading)


def _weights_time(serving: Serving, share: RankShare, machine: Machine) -> TokenTime:
    read, operations = float(share.dense), 2.0 * serving.passing * share.dense
    if share.experts:
        experts = serving.config.experts
        routed = serving.passing * serving.sharing
        chosen = experts.per_token / experts.count
        # The share of the experts that at least one token chooses, if all are equally likely.
        used = 1.0 - (1.0 - chosen) ** routed
        read += share.experts * used
        operations += 2.0 * routed * chosen * share.experts
    return _longer(operations / machine.products, read * serving.weight / machine.memory)


def _attention_time(serving: Serving, kind: LayerKind, machine: Machine) -> TokenTime:
    config, tp = serving.config, serving.layout.tp
    kept = cache_bytes(config, kind, serving.seq, tp, serving.cached, serving.itemsize)
    operations = _score_operations(serving, kind) * serving.passing / tp
    reading = serving.passing * kept / machine.memory
    return _longer(operations / machine.attention, reading)


def _score_operations(serving: Serving, kind: LayerKind) -> float:
    """Return the operations of a new token's attention to all cached tokens."""
    config = in_layer(serving.config, kind)
    attention, latent, indexer = config.attention, config.latent, config.indexer
    word, tokens = mixer_word(config, kind), reach(kind, serving.seq)
    if word == "attention":
        width = attention.head_dim + attention.value_dim
        return 2.0 * attention.heads * width * tokens
    if word not in ("latent", "sparse"):
        return 0.0
    # Queries are multiplied with latent vectors, not with keys.
    each = 2.0 * attention.heads * (2 * latent.kv_rank + latent.rope_dim)
    if word == "latent":
        return each * tokens
    chosen = min(tokens, indexer.topk or tokens)
    return each * chosen + 2.0 * indexer.heads * indexer.head_dim * tokens


def _exchange_seconds(serving: Serving, kind: LayerKind, machine: Machine) -> float:
    layout, gpu = serving.layout, machine.gpu
    row = serving.config.hidden * serving.itemsize
    found = 0.0
    if layout.tp > 1:
        sums = int(kind.mixer != "none") + int(kind.mlp != "none")
        sent = 2.0 * serving.passing * row * (layout.tp - 1) / layout.tp
        found += sums * (sent / link(gpu, layout.tp, 1) + SMALL_EXCHANGE)
    if kind.mlp == "experts" and serving.sharing > 1:
        rows = serving.passing * serving.config.experts.per_token / layout.tp
        sent = rows * routed_width(serving.config) * serving.itemsize
        there = exchange_seconds(gpu, sent, layout.ep, 1)
        found += 2 * (there + SMALL_EXCHANGE)
    return found


def message_seconds(serving: Serving, machine: Machine) -> float:
    """Return the seconds of a message between stages."""
    gpu, layout = machine.gpu, serving.layout
    near = layout.tp * layout.pp <= gpu.node
    speed = (gpu.nvlink if near else gpu.network) * LINKS
    return serving.passing * serving.config.hidden * serving.itemsize / speed + SMALL_EXCHANGE


def prompt_layer_seconds(
    serving: Serving, kind: LayerKind, share: RankShare, machine: Machine
) -> float:
    """Return the seconds of a prompt's pass through a layer."""
    return forward_seconds(serving.prompt, kind, share, machine) + LAUNCHES
