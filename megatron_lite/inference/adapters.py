"""`--adapter NAME=DIR`: LoRA adapters that are computed beside the model's weights, without merging.

All adapters share one set of modules in the engine. It has the largest rank and all targets; a smaller adapter is padded
with zeros, and its scale is part of its B. Adapter 0 is the model alone. An adapter may have an embedding and a head of
its own; others use the model's.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from formats.tensor import LazyTensor
from megaconv.engine.adapted import files_of_vectors
from megaconv.errors import UsageError
from megaconv.hub import resolve
from megaconv.local_paths import local_path
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.adapters import require_fit
from megatron_lite.checkpoint.held_tensor import HeldTensor
from megatron_lite.checkpoint.magnitudes import magnitudes_of_base
from megatron_lite.checkpoint.peft import ReadAdapter, read_adapter
from megatron_lite.checkpoint.token_rows import rows_of_base
from megatron_lite.checkpoint.weights import fill
from megatron_lite.checkpoint.whole_modules import as_floats
from megatron_lite.engine import Engine
from megatron_lite.models.lora.attached import dora_adapters
from megatron_lite.models.lora.parameters import rows_name
from megatron_lite.models.lora.whole import MODULES, WORDS
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import LoRA

BASE = 0
"""The number of the model without an adapter."""
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter of the command line."""

    name: str
    read: ReadAdapter
    directory: Path


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
        directory = local_path(resolve(path))
        found.append(NamedAdapter(name, read_adapter(directory, config), directory))
    return found


def joint_options(adapters: Sequence[NamedAdapter]) -> LoRA | None:
    """Return the options of modules that hold any of the adapters; None without adapters."""
    if not adapters:
        return None
    every = [adapter.read.options for adapter in adapters]
    rank = max(options.rank for options in every)
    targets = {target for options in every for target in options.targets}
    whole = {module for options in every for module in options.whole}
    return LoRA(
        rank,
        float(rank),
        tuple(sorted(targets)),
        dora=any(options.dora for options in every),
        whole=tuple(sorted(whole)),
        rows=_joint_rows(adapters, whole),
    )


def _joint_rows(
    adapters: Sequence[NamedAdapter], whole: Container[str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return LoRA.rows of all adapters. whole: modules that an adapter has whole. Raises UsageError for both of one module."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for adapter in adapters:
        for module, tokens in adapter.read.options.rows:
            if module in whole:
                raise UsageError(
                    f"--adapter {adapter.name}: has rows of single tokens for {WORDS[module]}, and another adapter has it whole; merge "
                    "one of them into its base (megaconv merge)"
                )
            found[module] |= set(tokens)
    return tuple((module, tuple(sorted(tokens))) for module, tokens in sorted(found.items()))


class AdapterBank:
    """This rank's values of all adapters, one of which the engine computes."""

    def __init__(
        self,
        engine: Engine,
        adapters: Sequence[NamedAdapter],
        weights: Mapping[str, LazyTensor],
    ) -> None:
        """Load all adapters. Collective. Raises TensorMismatch for an adapter of another model.

        weights: of the model, by canonical name.
        """
        held = [
            (module, info)
            for module, infos in zip(engine.chunks, engine.trained, strict=True)
            for info in infos
        ]
        self._parameters = [module.get_parameter(info.name) for module, info in held]
        infos = [info for _, info in held]
        of_base = {**rows_of_base(engine, weights), **magnitudes_of_base(engine)}
        base = []
        for info, own in zip(infos, self._parameters, strict=True):
            if info.native.parts.keys() <= of_base.keys():
                fill(own.data, info.native, of_base)
            base.append(own.detach().clone())
        self._values = [base]
        for adapter in adapters:
            tensors = {**_padded(adapter.read, engine), **_joined(adapter.read, engine, of_base)}
            self._values.append(_values(engine, infos, tensors, base))
        self.names = tuple(adapter.name for adapter in adapters)
        self.vector_files = tuple(files_of_vectors(adapter.directory) for adapter in adapters)
        """sentence-transformers' files beside each adapter, by name."""
        self._dora = dora_adapters(engine.chunks)
        have_dora = [False, *(adapter.read.options.dora for adapter in adapters)]
        self._changes = [
            self._changes_of(number, dora=dora) for number, dora in enumerate(have_dora)
        ]
        self.current = 1 if adapters else BASE
        self._use(self.current)

    def select(self, number: int) -> None:
        """Let the engine compute an adapter; 0: none."""
        if number != self.current:
            self._use(number)
            self.current = number

    def _use(self, number: int) -> None:
        self._put(number)
        for (adapter, _), change in zip(self._dora, self._changes[number], strict=True):
            adapter.fixed = change

    def _put(self, number: int) -> None:
        """Put an adapter's values into the engine."""
        for parameter, value in zip(self._parameters, self._values[number], strict=True):
            parameter.data = value

    def _changes_of(self, number: int, *, dora: bool) -> list[Tensor]:
        """Return the change of each matrix by DoRA with an adapter; zeros for one without DoRA. Collective."""
        self._put(number)
        found = [adapter.change_now(matrix) for adapter, matrix in self._dora]
        return found if dora else [torch.zeros_like(change) for change in found]


def _values(
    engine: Engine,
    infos: Sequence[ParameterInfo],
    tensors: Mapping[str, LazyTensor],
    base: Sequence[Tensor],
) -> list[Tensor]:
    """Return an adapter's values of parameters. A parameter of which it has nothing keeps the base's: 0, or the model's own."""
    require_fit(engine, infos, tensors)
    found = []
    for info, own in zip(infos, base, strict=True):
        if info.native.parts.keys() <= tensors.keys():
            own = torch.empty_like(own)
            fill(own, info.native, tensors)
        found.append(own)
    return found


def _joined(
    read: ReadAdapter, engine: Engine, base: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return an adapter's rows of single tokens, with those of the base for the tokens of other adapters. base: by name."""
    options = engine.options.lora
    assert options is not None
    found: dict[str, LazyTensor] = {}
    for canonical, module in MODULES.items():
        name = rows_name(canonical)
        if name not in read.tensors:
            continue
        every, own = (torch.tensor(each.tokens_of(module)) for each in (options, read.options))
        rows, changed = as_floats(base[name]), as_floats(read.tensors[name])
        rows[torch.searchsorted(every, own)] = changed
        found[name] = HeldTensor(rows)
    return found


def _padded(read: ReadAdapter, engine: Engine) -> dict[str, LazyTensor]:
    """Return the adapter at the engine's rank, with the scale as a part of each B."""
    options = engine.options.lora
    assert options is not None
    missing = options.rank - read.options.rank
    found = dict(read.tensors)
    for name, tensor in read.tensors.items():
        if name.endswith(LORA_A):
            found[name] = HeldTensor(pad(as_floats(tensor), (0, 0, 0, missing)))
        elif name.endswith(LORA_B):
            values = as_floats(tensor) * read.options.scale
            found[name] = HeldTensor(pad(values, (0, missing)))
    return found
