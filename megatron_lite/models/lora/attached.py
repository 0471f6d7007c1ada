"""Adds adapters to the selected matrices of a chunk, and describes their parameters."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.layer import Layer
from megatron_lite.models.lora.adapter import Adapter
from megatron_lite.models.lora.dora import DoraAdapter
from megatron_lite.models.lora.parameters import (
    Rows,
    Sharding,
    adapter_parameters,
    row_parameters,
)
from megatron_lite.models.lora.shares import (
    Module,
    modules_of,
    of_all_experts,
    refuse_dora,
    require_own,
    shares_of,
)
from megatron_lite.models.lora.targets import is_target
from megatron_lite.models.lora.token_rows import TokenRows
from megatron_lite.models.moe.experts import ExpertMatrix
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.parameter_kinds import Declaration
from megatron_lite.parallel.tensor import (
    ColumnLinear,
    Matrix,
    NormColumnLinear,
    RowLinear,
    TensorGroup,
)
from megatron_lite.settings.options import LoRA

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
    *,
    trains: bool,
) -> Iterator[tuple[NativeTensor, Declaration]]:
    """Add adapters to the matrices of a chunk, and yield their parameters in the order of a forward pass.

    chunk: on the meta device, like the new parameters. natives: the chunk's own parameters, in the order of a forward
    pass. trains: whether the adapters are trained.
    Raises NotExpressible.
    """
    modules = modules_of(config)
    shared = of_all_experts(modules)
    numbers = Counter[int]()
    of_experts, others = list[Module](), list[Module]()
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
        require_own(shares, shared, trains=trains)
        adapted = of_experts if sharding is Sharding.EXPERTS else others
        adapted += [share.module for share in shares]
        owner = chunk.get_submodule(layer[0])
        assert isinstance(owner, Layer)
        numbers[owner.layer] += 1
        place = owner.layer, numbers[owner.layer]
        kind = DoraAdapter if options.dora else Adapter
        adapter = kind(shares, own.shape[0], options, sharding, ranks, place)
        matrix.adapter = adapter
        yield from adapter_parameters(path, shares, sharding, options)
    if options.dora:
        refuse_dora(of_experts, others)
    for module in chunk.modules():
        if isinstance(module, Layer):
            _prepare_before(module)


def attach_rows(
    chunk: nn.Module, natives: Iterable[NativeTensor], plan: Plan, options: LoRA
) -> list[Rows]:
    """Add trained rows of single tokens to the embedding and the head of a chunk, and return them.

    natives: the chunk's own parameters.
    """
    found = list(row_parameters(natives, options))
    for each in found:
        with torch.device("meta"):
            rows = TokenRows(each.tokens, plan.config.hidden, plan.ranks)
        owner = chunk.get_submodule(each.rows.name.partition(".")[0])
        owner.token_rows = rows
    heads = (module for module in chunk.modules() if isinstance(module, Head))
    for head in heads:
        if head.weight is None:
            embedding = chunk.get_submodule("embedding")
            assert isinstance(embedding, Embedding)
            head.token_rows = embedding.token_rows
    return found


def _sharding(matrix: nn.Module) -> Sharding | None:
    return next((sharding for kinds, sharding in _SHARDING if isinstance(matrix, kinds)), None)


def adapted_matrices(chunks: Iterable[nn.Module]) -> Iterator[tuple[Matrix, Adapter]]:
    """Yield the matrices of chunks that have an adapter, with it."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Matrix) and isinstance(module.adapter, Adapter):
                yield module, module.adapter


def dora_adapters(chunks: Iterable[nn.Module]) -> list[tuple[DoraAdapter, Matrix]]:
    """Return the adapters with DoRA, each with its matrix."""
    found = []
    for matrix, adapter in adapted_matrices(chunks):
        if isinstance(adapter, DoraAdapter):
            found.append((adapter, matrix))
    return found


@contextmanager
def constant_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Compute the lengths of rows for DoRA only once in this region, in which no parameter changes. Collective.

    The parameters are in memory.
    """
    adapters = dora_adapters(chunks)
    for adapter, matrix in adapters:
        adapter.fixed = adapter.change_now(matrix)
    try:
        yield
    finally:
        for adapter, _ in adapters:
            adapter.fixed = None


@contextmanager
def without_adapters(
    chunks: Iterable[nn.Module], base: Sequence[tuple[nn.Parameter, Tensor]] = ()
) -> Iterator[None]:
    """Let the chunks compute without their adapters in this region.

    base: the base's values of parameters that are trained whole beside the adapters.
    """
    trained = [(parameter, parameter.data) for parameter, _ in base]
    adapters = list(adapted_matrices(chunks))
    for matrix, _ in adapters:
        matrix.adapter = None
    for parameter, values in base:
        parameter.data = values
    try:
        yield
    finally:
        for matrix, adapter in adapters:
            matrix.adapter = adapter
        for parameter, values in trained:
            parameter.data = values


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
