"""The magnitudes with which DoRA begins: the lengths of the rows of the frozen matrices."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from formats.tensor import LazyTensor
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.held_tensor import HeldTensor
from megatron_lite.engine import Engine
from megatron_lite.models.lora.dora import DoraAdapter
from megatron_lite.models.lora.parameters import MAGNITUDE
from megatron_lite.parallel.tensor import Matrix


def magnitudes_of_base(engine: Engine) -> dict[str, LazyTensor]:
    """Return the magnitudes of new adapters by name; {} without DoRA. Collective.

    The engine holds the base's weights. Rows that other ranks have are 0.
    """
    options = engine.options.lora
    if options is None or not options.dora:
        return {}
    natives = [{info.name: info.native for info in infos} for infos in engine.adapters]
    found: dict[str, LazyTensor] = {}
    for number, name, _ in engine.parameters():
        path, _, last = name.rpartition(".")
        matrix = engine.chunks[number].get_submodule(path)
        adapter = getattr(matrix, "adapter", None)
        if last == "weight" and isinstance(adapter, DoraAdapter):
            assert isinstance(matrix, Matrix)
            adapter.prepare(engine.grid.device)
            lengths = adapter.lengths(matrix, of_base=True).cpu()
            found.update(_by_name(f"{path}.adapter.pairs", adapter, lengths, natives[number]))
    return found


def _by_name(
    path: str, adapter: DoraAdapter, lengths: Tensor, natives: Mapping[str, NativeTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the lengths of each module that the matrix has parts of. lengths: of all of them, module after module."""
    first = 0
    for key in adapter.pairs:
        native = natives[f"{path}.{key}{MAGNITUDE}"]
        own = lengths[first : first + native.shape[0]]
        first += native.shape[0]
        ((name, regions),) = native.parts.items()
        whole = torch.zeros(max(region.box.row1 for region in regions))
        for region in regions:
            rows = slice(region.box.row0, region.box.row1)
            whole[rows] = own[region.row : region.row + region.box.rows]
        yield name, HeldTensor(whole)
