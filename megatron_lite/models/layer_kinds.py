"""The sizes of layers, those after the last one among them."""

from collections.abc import Mapping

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.sharding import own_shares


def layer_shares(
    config: ModelConfig, layer: int, sizes: Mapping[str, int], tp: int
) -> dict[str, int]:
    """Return a tensor rank's share of the sizes in a layer.

    sizes: the rank's share of the model's sizes. Raises LayoutError if a size of the layer can't be sharded.
    """
    own = config.own_sizes(min(layer, config.layer_count - 1))
    return {**sizes, **own_shares(own, Layout(tp))}
