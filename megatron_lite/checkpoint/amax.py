"""FP8 amax histories in a checkpoint, by matrix, over all pipeline stages.

Delayed scaling computes its scales from these histories (products/fp8.py). Other recipes compute scales from the
current values and keep no state.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from formats.errors import CorruptCheckpoint
from formats.tensor import Box, LazyTensor
from megatron_lite.checkpoint.weights import read
from megatron_lite.engine import Engine
from megatron_lite.products.fp8 import ROLES, DelayedProduct
from megatron_lite.products.selection import delayed_products

AMAX = "amax"
"""The key under which the histories are stored, next to the keys of Engine.state()."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def histories(engine: Engine) -> dict[str, Tensor]:
    """Return float32 [roles, steps] in main memory by matrix name. Collective over the pipeline stages.

    Layer numbers in the names count over the whole model.
    """
    fp8, group = engine.options.fp8, engine.grid.column
    if fp8 is None or fp8.recipe != "delayed":
        return {}
    own = {name: product.state().cpu() for name, product in _named(engine) if product.history}
    if group is None:
        return own
    everyones: list[dict[str, Tensor]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    return {name: found for stage in everyones for name, found in stage.items()}


def restore(engine: Engine, found: Mapping[str, Any]) -> None:
    """Restore the histories that histories() returned; `found` holds them as lazy tensors.

    A matrix that is missing from `found` starts with an empty history. Raises CorruptCheckpoint.
    """
    for name, product in _named(engine):
        if name in found:
            product.load_state(_read(name, found[name]).to(engine.grid.device))


def _read(name: str, tensor: LazyTensor) -> Tensor:
    shape = tuple(getattr(tensor, "shape", ()))
    if len(shape) != 2 or shape[0] != len(ROLES) or tensor.dtype != "float32":
        raise CorruptCheckpoint(
            f"the FP8 history of {name} should be float32 [{len(ROLES)}, steps], found {list(shape)}; --no-load-optim starts without it"
        )
    return read(tensor, Box(0, shape[0], 0, shape[1]))


def _named(engine: Engine) -> Iterator[tuple[str, DelayedProduct]]:
    for module, chunk in zip(engine.chunks, engine.grid.chunks(), strict=True):
        for name, product in delayed_products(module):
            yield _with_layer(name, chunk.first_layer), product


def _with_layer(name: str, first_layer: int) -> str:
    """Return a name with the layer's number in the model instead of that in its chunk."""

    def numbered(layer: re.Match[str]) -> str:
        return f"decoder.layers.{int(layer[1]) + first_layer}."

    return _LAYER.sub(numbered, name)
