"""`--adapter NAME=DIR`: LoRA adapters that are computed beside the model's weights, without merging.

All adapters share one set of modules in the engine. It has the largest rank and all targets; a smaller adapter is padded
with zeros, and its scale is part of its B. Adapter 0 is the model alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from formats.tensor import LazyTensor, Shape
from megaconv.errors import UsageError
from megaconv.hub import resolve
from megaconv.local_paths import local_path
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Key
from megatron_lite.checkpoint.adapters import HeldTensor, load_adapters
from megatron_lite.checkpoint.initial_weights import ConstantTensor
from megatron_lite.checkpoint.peft import ReadAdapter, read_adapter
from megatron_lite.engine import Engine
from megatron_lite.settings.options import LoRA

BASE = 0
"""The number of the model without an adapter."""
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter of the command line."""

    name: str
    read: ReadAdapter


def read_adapters(words: Sequence[str], config: ModelConfig) -> list[NamedAdapter]:
    """Read the adapters of --adapter: `DIR` or `NAME=DIR`. Raises CheckpointError."""
    found: list[NamedAdapter] = []
    for word in words:
        name, equals, path = word.partition("=")
        # A path that exists may contain `=` itself.
        if not equals or Path(word).exists():
            name, path = Path(word.rstrip("/")).name, word
        if name in [other.name for other in found]:
            raise UsageError(
                f"--adapter {word}: {name} names two adapters; give them names, as in chat={path}"
            )
        found.append(NamedAdapter(name, read_adapter(local_path(resolve(path)), config)))
    return found


def joint_options(adapters: Sequence[NamedAdapter]) -> LoRA | None:
    """Return the options of modules that hold any of the adapters; None without adapters."""
    if not adapters:
        return None
    every = [adapter.read.options for adapter in adapters]
    rank = max(options.rank for options in every)
    targets = {target for options in every for target in options.targets}
    return LoRA(rank, float(rank), tuple(sorted(targets)))


class AdapterBank:
    """This rank's values of all adapters, one of which the engine computes."""

    def __init__(self, engine: Engine, adapters: Sequence[NamedAdapter]) -> None:
        """Load all adapters. Collective. Raises TensorMismatch for an adapter of another model."""
        self._parameters = _parameters(engine)
        shapes = _shapes(engine)
        self._values: list[list[Tensor]] = [[torch.zeros_like(own) for own in self._parameters]]
        for adapter in adapters:
            load_adapters(engine, _padded(adapter.read, shapes, engine))
            self._values.append([own.detach().clone() for own in self._parameters])
        self.names = tuple(adapter.name for adapter in adapters)
        self.current = BASE
        self.select(1 if adapters else BASE)

    def select(self, number: int) -> None:
        """Let the engine compute an adapter; 0: none."""
        if number == self.current:
            return
        for parameter, value in zip(self._parameters, self._values[number], strict=True):
            parameter.data.copy_(value)
        self.current = number


def _parameters(engine: Engine) -> list[Tensor]:
    found: list[Tensor] = []
    for module, infos in zip(engine.chunks, engine.adapters, strict=True):
        found += [module.get_parameter(info.name) for info in infos]
    return found


def _shapes(engine: Engine) -> dict[str, Shape]:
    """Return the least shapes of the matrices from which this rank reads."""
    found: dict[str, Shape] = {}
    for infos in engine.adapters:
        for info in infos:
            for name, regions in info.native.parts.items():
                rows = max(region.box.row1 for region in regions)
                cols = max(region.box.col1 for region in regions)
                before = found.get(name, (0, 0))
                found[name] = max(rows, before[0]), max(cols, before[1])
    return found


def _padded(read: ReadAdapter, shapes: dict[str, Shape], engine: Engine) -> dict[Key, LazyTensor]:
    """Return the adapter at the engine's rank, with zeros for modules that it has not."""
    options = engine.options.lora
    assert options is not None
    found: dict[Key, LazyTensor] = {}
    for name, shape in shapes.items():
        if name not in read.tensors:
            found[Key(name)] = ConstantTensor(shape, 0.0)
    for name, tensor in read.tensors.items():
        assert isinstance(tensor, HeldTensor)
        missing = options.rank - read.options.rank
        if name.endswith(LORA_A):
            values = torch.nn.functional.pad(tensor.values, (0, 0, 0, missing))
        else:
            values = torch.nn.functional.pad(tensor.values * read.options.scale, (0, missing))
        found[Key(name)] = HeldTensor(values)
    return found
