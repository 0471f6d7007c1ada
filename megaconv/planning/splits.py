"""The layers of each pipeline stage: as even as they can be, with the head counted as layers of its time."""

from megaconv.model.config import ModelConfig
from megaconv.planning.mixers import in_layer


def head_layers(config: ModelConfig) -> int:
    """Return the number of layers that take about as long as the head, with layers that predict further tokens."""
    last = config.layers[-1]
    config = in_layer(config, last)
    width, heads = config.hidden, 1 + config.mtp_layers
    attention = (
        2 * width * config.attention.head_dim * (config.attention.heads + config.attention.kv_heads)
    )
    gates = 3 if config.mlp.gated else 2
    active = config.mlp.ffn
    if last.mlp == "experts":
        active = config.experts.per_token * config.experts.ffn + config.experts.shared_ffn
    layer = attention + gates * width * active
    return round(heads * config.vocab * width / max(layer, 1)) + config.mtp_layers


def even_stages(layers: int, stages: int, at_the_end: int) -> tuple[int, ...]:
    """Return the layers of each stage. at_the_end: layers for which the head counts.

    If the stages can't be equal, the last one has fewer layers for the head, and the first ones have one less. They
    keep the activations of more passes.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    extra = min(at_the_end, layers // stages + 1)
    each, more = divmod(layers + extra, stages)
    found = [each] * (stages - more) + [each + 1] * more
    found[-1] = max(0, found[-1] - extra)
    found[0] += layers - sum(found)
    return tuple(found)
