"""The tensors that pass from layer to layer beside the hidden states: inputs of each layer, and shared keys and values.

Layers of one kind, with a window or without one, share the keys and values of the last layer of this kind that has its
own.
"""

from collections.abc import Mapping

from megaconv.model.config import ModelConfig
from megaconv.planning.mixers import in_layer

Kind = bool
"""True for layers with a window."""


def kind_of(config: ModelConfig, layer: int) -> Kind:
    """Return the kind of a layer."""
    return config.layers[layer].window is not None


def sources(config: ModelConfig) -> Mapping[Kind, int]:
    """Return the layer whose keys and values later layers share, by kind; empty if no layers share any."""
    sharing = [layer for layer, kind in enumerate(config.layers) if kind.shares_kv]
    kinds = {kind_of(config, layer) for layer in sharing}
    own = range(min(sharing, default=0))
    # A later layer of a kind replaces an earlier one.
    return {kind_of(config, layer): layer for layer in own if kind_of(config, layer) in kinds}


def kept_before(config: ModelConfig, layer: int) -> tuple[Kind, ...]:
    """Return the kinds whose shared keys and values exist before a layer, and that it or a later layer needs."""
    needed = {kind.window is not None for kind in config.layers[layer:] if kind.shares_kv}
    found = sources(config).items()
    return tuple(kind for kind, source in found if kind in needed and source < layer)


def caches_keys(config: ModelConfig, layer: int, first: int) -> bool:
    """Return whether a layer has its own part of the cache. first: the first layer of its stage.

    Layers that share keys and values use the part of an earlier layer of the stage, if there is one.
    """
    is_mtp = layer >= config.layer_count
    if is_mtp or not config.layers[layer].shares_kv:
        return True
    kind = kind_of(config, layer)
    earlier = range(max(first, sources(config)[kind]), layer)
    return all(kind_of(config, each) != kind for each in earlier)


def input_elements(config: ModelConfig, layer: int) -> int:
    """Return the elements of a token's inputs of a layer and of all that follow."""
    return (config.layer_count - layer) * config.layer_inputs.width


def shared_elements(config: ModelConfig, layer: int) -> int:
    """Return the elements of a token's shared keys and values that pass from earlier layers to a layer."""
    made = sources(config)
    owners = [config.layers[made[kind]] for kind in kept_before(config, layer)]
    sizes = [in_layer(config, owner).attention for owner in owners]
    return sum(2 * each.kv_heads * each.head_dim for each in sizes)
