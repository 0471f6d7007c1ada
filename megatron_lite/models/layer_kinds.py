"""The kinds of layers, those after the last one among them."""

from dataclasses import replace

from megaconv.model.config import ModelConfig
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
