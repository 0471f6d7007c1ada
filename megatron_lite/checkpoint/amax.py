"""The histories by which FP8's delayed scaling finds its scales (parallel/fp8.py), in a checkpoint: by matrix, of all stages.

Other recipes look at the numbers that they scale, and have nothing to keep.
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
from megatron_lite.models.fp8 import delayed_products
from megatron_lite.parallel.fp8 import ROLES, DelayedProduct

AMAX = "amax"
"""Their key beside what Engine.state() gives."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def histories(engine: Engine) -> dict[str, Tensor]:
    """float32 [roles, steps], in main memory, by matrix with layers counted over the whole model. Collective over the stages."""
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
    """found: as histories() gave them, lazy. A matrix that isn't among them begins anew. Raises CorruptCheckpoint."""
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
            yield _LAYER.sub(lambda layer: f"decoder.layers.{int(layer[1]) + chunk.first_layer}.", name), product  # noqa: B023  # used at once
