"""The kinds and sizes of layers, those after the last one among them."""

from collections.abc import Mapping
from dataclasses import replace

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.sharding import own_shares
from megaconv.model.subjects import LayerKind


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Return the kind of a layer.

    Layers that predict further tokens come after all others and have the last layer's kind. They have attention, even
    if the last layer has a delta net.
    """
    if layer < config.layer_count:
        return config.layers[layer]
    last = config.layers[-1]
    return replace(last, mixer="attention") if last.mixer == "linear" else last


def layer_shares(
    config: ModelConfig, layer: int, sizes: Mapping[str, int], tp: int
) -> dict[str, int]:
    """Return a tensor rank's share of the sizes in a layer.

    sizes: the rank's share of the model's sizes. Raises LayoutError if a size of the layer can't be sharded.
    """
    own = config.own_sizes(min(layer, config.layer_count - 1))
    return {**sizes, **own_shares(own, Layout(tp))}
