"""The size of a model, from its configuration alone."""

from math import prod

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.table import canonical_shapes


def parameter_count(config: ModelConfig) -> int:
    """Return the parameters of the whole model, without padding."""
    shapes = canonical_shapes(family(config.family).rows, config)
    return sum(prod(shape) for shape in shapes.values())
