"""Weights into a model: each rank reads its own rectangles of canonical tensors, wherever they lie."""

from collections.abc import Mapping

from formats.tensor import LazyTensor
from megatron_lite.engine import Engine


def load_weights(engine: Engine, tensors: Mapping[str, LazyTensor]) -> None:
    """Fill all parameters from canonical tensors by name (`megaconv.open(path).tensors`), in any dtype; masters follow.

    Raises TensorMismatch for a tensor that is missing, unknown or misshapen, before anything is changed.
    """
    raise NotImplementedError


def init_weights(engine: Engine, std: float, seed: int) -> None:
    """Random weights, the same at every layout: N(0, std), projections onto the residual N(0, std / sqrt(2 layers))."""
    raise NotImplementedError
