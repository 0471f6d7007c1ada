"""The layers inside an MTP layer, which predicts a further token."""

from dataclasses import replace

from megaconv.model.described import DescribedModel
from megaconv.model.subjects import LayerKind

HYBRID_MTP = "*E"
"""The hybrid pattern of the layers inside an MTP layer, if each layer of the model is a mixer or an MLP."""


def predicting_kinds(config: DescribedModel) -> tuple[LayerKind, ...]:
    """The kinds of the layers inside one MTP layer.

    It is one layer like the last one, with attention even if the last one has a delta net. If no layer has both a mixer and
    an MLP, it is a layer of attention and a layer of experts.
    """
    last = config.layers[-1]
    if "none" in (last.mixer, last.mlp):
        attention = replace(last, mixer="attention", mlp="none")
        return attention, replace(last, mixer="none", mlp="experts")
    return (replace(last, mixer="attention") if last.mixer == "linear" else last,)


def kind_of_layer(config: DescribedModel, layer: int) -> LayerKind:
    """The kind of a layer. The layers inside MTP layers have the numbers after the last layer."""
    if layer < config.layer_count:
        return config.layers[layer]
    inside = predicting_kinds(config)
    return inside[(layer - config.layer_count) % len(inside)]
