"""Puts a checkpoint's tensors behind the modules of a network whose parameters have no memory.

    matrices of layers, experts, the head     read in blocks of rows, while a product is computed (matrices.py)
    the embedding                             the rows of the tokens
    the bias of a head                        read once
    all other parameters of a unit            read before the unit is called, freed after it

Units are those of Network.units: the embedding, each layer, the last norm. Experts that no token chooses are not read,
except for their biases.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from formats.tensor import LazyTensor
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.weights import check_tensors
from megatron_lite.engine import Engine
from megatron_lite.forward.matrices import Buffer, Reader, StreamedEmbedding, StreamedProduct
from megatron_lite.models.ends import Head
from megatron_lite.models.network_interface import Network
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.parallel.tensor import VocabEmbedding
from megatron_lite.products.product import PLAIN


def stream_weights(engine: Engine, tensors: Mapping[str, LazyTensor], buffer_bytes: int) -> None:
    """Let an engine without memory for parameters (allocates=False) read canonical tensors by name, of any dtype.

    buffer_bytes: of the block of rows that is read at a time.
    Raises TensorMismatch for a missing, unknown or misshapen tensor. A pass may raise CorruptCheckpoint.
    """
    check_tensors(engine, tensors)
    reader = Reader(tensors, engine.dtype, engine.grid.device)
    buffer = Buffer(buffer_bytes, engine.dtype, engine.grid.device)
    for network, infos in zip(engine.chunks, engine.infos, strict=True):
        _Streams(engine, network, reader, buffer).put_behind(infos)


class _Small(NamedTuple):
    """A parameter that is read whole."""

    module: nn.Module
    name: str
    """The parameter's name in the module."""
    native: NativeTensor
    dtype: torch.dtype


@dataclass
class _Unit:
    """The small parameters of a unit, which exist only while the unit computes."""

    reader: Reader
    parameters: list[_Small] = field(default_factory=list)

    def read(self, *_: Any) -> None:
        """Read the parameters. A hook before the unit's call."""
        for module, name, native, dtype in self.parameters:
            module.register_parameter(name, self.reader.parameter(native, dtype))

    def free(self, *_: Any) -> None:
        """Free the parameters. A hook after the unit's call."""
        for module, name, native, _dtype in self.parameters:
            without_memory = torch.empty(native.shape, device="meta")
            empty = nn.Parameter(without_memory, requires_grad=False)
            module.register_parameter(name, empty)


@dataclass(frozen=True)
class _Streams:
    """A network that is connected to its tensors."""

    engine: Engine
    network: Network
    reader: Reader
    buffer: Buffer

    def put_behind(self, infos: Iterable[ParameterInfo]) -> None:
        """Connect every parameter."""
        units = {unit: _Unit(self.reader) for unit in self.network.units()}
        unit_of = {inner: held for unit, held in units.items() for inner in unit.modules()}
        for info in infos:
            path, _, name = info.name.rpartition(".")
            module = self.network.get_submodule(path)
            if isinstance(module, VocabEmbedding):
                self._put_behind_embedding(path, module, info)
            elif isinstance(module, Head):
                self._put_behind_head(module, name, info)
            elif name == "weight" and getattr(module, "product", None) is PLAIN:
                setattr(module, "product", self._product(info))  # noqa: B010
            else:
                small = _Small(module, name, info.native, self.engine.dtype_of(info))
                unit_of[module].parameters.append(small)
        for unit, held in units.items():
            if held.parameters:
                unit.register_forward_pre_hook(held.read)
                unit.register_forward_hook(held.free)

    def _product(self, info: ParameterInfo) -> StreamedProduct:
        return StreamedProduct(info.native, self.reader, self.buffer)

    def _put_behind_embedding(self, path: str, module: VocabEmbedding, info: ParameterInfo) -> None:
        """Replace an embedding, and let tied heads read its table."""
        outer, _, name = path.rpartition(".")
        streamed = StreamedEmbedding(module, info.native, self.reader)
        setattr(self.network.get_submodule(outer), name, streamed)
        if not module.heads_share:
            return
        for head in self.network.modules():
            if isinstance(head, Head) and head.weight is None:
                head.product_of_logits = self._product(info)

    def _put_behind_head(self, head: Head, name: str, info: ParameterInfo) -> None:
        if name == "weight":
            head.product_of_logits = self._product(info)
        else:
            dtype = self.engine.dtype_of(info)
            head.bias = self.reader.parameter(info.native, dtype)
