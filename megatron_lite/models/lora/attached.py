"""Adds adapters to the selected matrices of a chunk, and describes their parameters."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from formats.tensor import Box
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor, Region
from megatron_lite.models.layer import Layer
from megatron_lite.models.lora.adapter import Adapter, Pair, Sharding
from megatron_lite.models.lora.shares import Module, Share, modules_of, shares_of
from megatron_lite.models.moe.experts import ExpertMatrix
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear, RowLinear, TensorGroup
from megatron_lite.settings.options import LoRA

ALL_LINEAR = "all-linear"
_NOT_IN_PEFT = ".mixer.out_proj"
"""The matrix of Mamba 2 for which peft refuses adapters: fused kernels would skip them."""
_SHARDING = (
    ((NormColumnLinear, ColumnLinear), Sharding.COLUMNS), ((RowLinear,), Sharding.ROWS), ((ExpertMatrix,), Sharding.EXPERTS),
    ((WholeLinear,), Sharding.NOT_AT_ALL),
)  # fmt: skip
_LAYER = re.compile(r"decoder\.layers\.\d+(?=\.)")


def attach(
    chunk: nn.Module,
    natives: Iterable[NativeTensor],
    config: ModelConfig,
    options: LoRA,
    ranks: TensorGroup,
) -> Iterator[tuple[NativeTensor, Kind]]:
    """Add adapters to the matrices of a chunk, and yield their parameters in the order of a forward pass.

    chunk: on the meta device, like the new parameters. natives: the chunk's own parameters, in the order of a forward
    pass.
    Raises NotExpressible.
    """
    modules = modules_of(config)
    numbers = Counter[int]()
    for own in natives:
        path, _, last = own.name.rpartition(".")
        layer = _LAYER.match(own.name)
        if last != "weight" or layer is None:
            continue
        matrix = chunk.get_submodule(path)
        sharding = _sharding(matrix)
        if sharding is None:
            continue
        possible = shares_of(own, modules)
        shares = [share for share in possible if is_target(share.module, path, options.targets)]
        if not shares:
            continue
        owner = chunk.get_submodule(layer[0])
        assert isinstance(owner, Layer)
        numbers[owner.layer] += 1
        place = owner.layer, numbers[owner.layer]
        adapter = Adapter(shares, own.shape[0], options, sharding, ranks, place)
        matrix.adapter = adapter
        yield from _parameters(adapter, f"{path}.adapter.pairs", shares)
    for module in chunk.modules():
        if isinstance(module, Layer):
            _prepare_before(module)


def _sharding(matrix: nn.Module) -> Sharding | None:
    return next((sharding for kinds, sharding in _SHARDING if isinstance(matrix, kinds)), None)


def is_target(module: Module, core: str, targets: Sequence[str]) -> bool:
    """Return whether a target is the end of the module's path in transformers' model, or of its path in Megatron's (`core`).

    `all-linear` leaves out the matrix that peft refuses, so that peft can load the adapter.
    """
    name = f"{module.path}.{module.parameter}" if module.parameter else module.path
    if ALL_LINEAR in targets and not core.endswith(_NOT_IN_PEFT):
        return True
    return any(
        path == word or path.endswith(f".{word}") for word in targets for path in (name, core)
    )


@contextmanager
def without_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Let the chunks compute without their adapters in this region."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    adapters = [
        (module, module.adapter)
        for module in modules
        if isinstance(getattr(module, "adapter", None), Adapter)
    ]
    for module, _ in adapters:
        module.adapter = None  # type: ignore[assignment]  # as before an adapter is attached
    try:
        yield
    finally:
        for module, adapter in adapters:
            module.adapter = adapter


def check_targets(config: ModelConfig, targets: Sequence[str], *, found: bool) -> None:
    """Raise UsageError for targets that no module of the model's decoder has. found: whether any matrix has an adapter."""
    known = {where.module.key for where in modules_of(config).values()} | {
        "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", ALL_LINEAR,
    }  # fmt: skip
    for word in targets:
        if word.rpartition(".")[2] not in known:
            raise UsageError(
                f"--lora-targets {word}: is no matrix of this model; there are {', '.join(sorted(known))}"
            )
    if not found:
        raise UsageError(
            f"--lora-targets {' '.join(targets)}: no matrix of this model's layers is among them"
        )


def _prepare_before(layer: nn.Module) -> None:
    """Register a hook on a layer that prepares its adapters for the pass, also during recomputation."""
    adapters = [module for module in layer.modules() if isinstance(module, Adapter)]

    def prepare(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, run, *_further = arguments
        for adapter in adapters:
            adapter.prepare(x.device)
            adapter.seed = getattr(run, "seed", None)

    if adapters:
        layer.register_forward_pre_hook(prepare)


def _parameters(
    adapter: Adapter, path: str, shares: Sequence[Share]
) -> Iterator[tuple[NativeTensor, Kind]]:
    for share in shares:
        pair, rank = adapter.pairs[share.module.key], adapter.options.rank
        assert isinstance(pair, Pair)
        place = f"{path}.{share.module.key}"
        a = (Region(Box(0, rank, *share.columns), 0),)
        b, row = [], 0
        for run in share.rows:
            b.append(Region(Box(run.whole, run.whole + run.size, 0, rank), row))
            row += run.size
        for name, end, regions in (("lora_a", "lora_A", a), ("lora_b", "lora_B", tuple(b))):
            kind, shape = pair.kinds[name], tuple(pair.get_parameter(name).shape)
            native = NativeTensor(
                f"{place}.{name}",
                {f"{share.module.name}.{end}.weight": regions},
                shape,
                kind.copied,
            )
            yield native, kind
