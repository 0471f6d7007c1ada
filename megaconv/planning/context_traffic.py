"""Bytes that context-parallel ranks exchange in a layer, so that each token sees the tokens of other ranks.

attention      keys and values, by --cp-comm-type
score rules    keys and values of all ranks, whatever the method is: limited scores, ALiBi, chunks, an indexer
states         heads for tokens: a rank computes some channels of all tokens (Mamba, delta nets, convolutions)
"""

from collections.abc import Iterator

from megaconv.model.layout import Chunk
from megaconv.model.subjects import LayerKind
from megaconv.planning.collectives import FLOAT32, INT64, Counted
from megaconv.planning.mixers import MixerCost, in_layer, mixer_cost
from megaconv.planning.run import Run


def of_other_tokens(run: Run, kind: LayerKind, mixer: MixerCost, forward: int) -> Iterator[Counted]:
    """Yield the traffic of a mixer. forward: how often its forward pass is computed."""
    states = mixer.channels_of_states(run.config, run.layout.tp * run.cp)
    if states:
        exchanged = run.tokens * states / run.layout.tp * run.itemsize
        yield "cp", "all_to_all", exchanged * (forward + run.backward)
    if mixer.has_indexer:
        yield (
            "cp",
            "all_gather",
            run.cp * run.tokens * run.config.indexer.head_dim * run.itemsize * forward,
        )
    if not mixer.attends:
        return
    if _has_rules(run, kind, mixer):
        yield from _of_gathered_keys(run, kind, forward)
    else:
        yield from _of_attention(run, kind, forward)


def of_positions(run: Run, chunk: Chunk) -> Iterator[Counted]:
    """Yield the traffic of the positions of all keys. A pass gathers them once, for score rules."""
    kinds = run.config.layers[chunk.first_layer : chunk.first_layer + chunk.layers]
    if any(_has_rules(run, kind, mixer_cost(run.config, kind)) for kind in kinds):
        yield "cp", "all_gather", run.seq * INT64


def _has_rules(run: Run, kind: LayerKind, mixer: MixerCost | None) -> bool:
    """Return whether no kernel computes the scores of a layer. Then each rank needs the keys of all ranks."""
    if mixer is None or not mixer.attends:
        return False
    limited = run.config.attention.score_cap is not None
    in_chunks = kind.chunk is not None and run.seq > kind.chunk
    return limited or in_chunks or mixer.has_indexer or run.config.positions.kind == "alibi"


def _of_gathered_keys(run: Run, kind: LayerKind, forward: int) -> Iterator[Counted]:
    attention = in_layer(run.config, kind).attention
    width = attention.head_dim + (run.config.latent.v_dim or attention.value_dim)
    whole = run.cp * run.tokens * attention.kv_heads / run.layout.tp * width * run.itemsize
    yield "cp", "all_gather", whole * forward
    yield "cp", "reduce_scatter", whole * run.backward


def _of_attention(run: Run, kind: LayerKind, forward: int) -> Iterator[Counted]:
    """Yield the traffic of attention by a kernel. Gradients of keys and values are float32.

    Except with a2a, values are sent with the width of keys.
    """
    attention = in_layer(run.config, kind).attention
    cp, tp = run.cp, run.layout.tp
    method, near = run.context, run.near
    has_levels = near > 1
    kv_heads = attention.kv_heads // tp
    keys = run.tokens * kv_heads * attention.head_dim
    passes = forward + run.backward
    if method in ("p2p", "a2a+p2p"):
        # With `near` ranks, a rank has `near` times the tokens and 1/near of the heads.
        far = cp // near
        keys_sent = run.itemsize * (far - 1) * passes
        gradients_sent = FLOAT32 * far * run.backward
        sent = 2 * keys * (keys_sent + gradients_sent)
        yield "cp_far" if has_levels else "cp", "send", sent
    if method == "all_gather":
        whole = 2 * keys * cp
        yield "cp", "all_gather", whole * run.itemsize * passes
        yield "cp", "reduce_scatter", whole * FLOAT32 * run.backward
    if method in ("a2a", "a2a+p2p"):
        heads = attention.heads // tp
        v_dim = run.config.latent.v_dim or attention.value_dim
        queries = run.tokens * heads * attention.head_dim
        values = run.tokens * kv_heads * v_dim
        output = run.tokens * heads * v_dim
        elements = queries + keys + values + output
        exchanged = elements * run.itemsize * passes
        yield "cp_near" if has_levels else "cp", "all_to_all", exchanged
