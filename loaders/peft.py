"""LoRA and DoRA adapters as peft saves them, to be translated; what merges them into weights is `--adapter`.

Opened only where it is asked for by name: an adapter is no model, and whoever doesn't know that should hear of merging.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from megaconv.engine.adapters.derived import EveryNth, Rows
from megaconv.engine.adapters.peft_files import (
    CONFIG,
    Adapter,
    ModuleAdapter,
    adapter_directory,
    module_path,
    open_adapter,
)
from megaconv.engine.adapters.sharing import with_shared
from megaconv.engine.adapters.targets import weights_of
from megaconv.engine.adapters.translation import Pair, adaptable_weights, is_flipped, open_pairs
from megaconv.errors import NotExpressible, TensorMismatch, UnknownFormat, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.check import listing
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor
from megaconv.options import LoadOptions

DESCRIPTION = (
    "LoRA and DoRA adapters of peft (adapter_config.json, adapter_model.safetensors), by name only; needs --config"
)


def detect(path: Path) -> bool:
    return False


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for an adapter that is incomplete, of another model, or has more than pairs of matrices."""
    path = adapter_directory(path)
    if not (path / CONFIG).is_file():
        raise UnknownFormat(f"{path}: has no {CONFIG}; expected a directory as peft's save_pretrained leaves it")
    adapter = open_adapter(path)
    if options.config is None:
        base = f", {adapter.config.base!r} by its own words" if adapter.config.base else ""
        raise UsageError(
            f"{path}: an adapter doesn't say what model it is for; give --config with the Hugging Face directory of its base{base}",
            code="config-needed",
        )
    family, config = read_config(options.config / CONFIG_NAME)
    _refuse_more_than_pairs(adapter)
    known = adaptable_weights(family, config, HF)
    pairs = (
        pair
        for module, weight in weights_of(adapter, family, config)
        for pair in _pairs(module, weight, known, adapter)
    )
    opened = open_pairs(
        config, pairs,
        base=adapter.config.base, dropout=adapter.config.dropout, source=f"peft, {_kind(adapter)}", where=str(adapter.weights),
    )  # fmt: skip
    return opened if options.metadata_only else with_shared(opened, family)


def _kind(adapter: Adapter) -> str:
    return "DoRA" if adapter.config.dora else "LoRA"


def _refuse_more_than_pairs(adapter: Adapter) -> None:
    """Raises NotExpressible for what has no place beside two matrices a module."""
    found = {
        "whole tensors": bool(adapter.replaced),
        "lora_bias": any(module.bias is not None for module in adapter.modules),
        "an adapter of the embedding": any(module.embedding for module in adapter.modules),
    }
    there = [what for what, is_there in found.items() if is_there]
    if there:
        raise NotExpressible(
            f"{adapter.weights}: has {listing(there)}; only LoRA and DoRA of linear layers are translated. "
            "megaconv merge BASE ADAPTER merges it into its base"
        )


def _pairs(
    module: ModuleAdapter, weight: NativeTensor, known: Mapping[str, NativeTensor], adapter: Adapter
) -> Iterator[Pair]:
    """Of one module: one, or one for each expert where all experts of a layer are one parameter."""
    if module.contradicts(adapter.config):
        has = "no" if module.magnitude is None else "a"
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has {has} magnitude, its configuration says otherwise"
        )
    if len(weight.shape) == 3:
        yield from _of_experts(module, weight, adapter)
    elif weight.name in known:
        yield Pair(weight, module.a, module.b, _alpha(module, adapter, 1), module.module, module.magnitude)
    else:
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} is no linear layer of the model (embedding and head are not translated)",
            code="unknown-tensor",
        )


def _of_experts(module: ModuleAdapter, weight: NativeTensor, adapter: Adapter) -> Iterator[Pair]:
    """A parameter of all experts: A [experts * r, in] has a run of rows for each, B [out, r * experts] every experts-th column."""
    if is_flipped(weight) or any(region.halves for regions in weight.parts.values() for region in regions):
        raise NotExpressible(
            f"{adapter.weights}: {module.module} is an adapter of experts that {weight.name} holds transposed or interleaved, which "
            "isn't translated. megaconv merge BASE ADAPTER merges it into its base"
        )
    if module.magnitude is not None:
        raise NotExpressible(f"{adapter.weights}: {module.module} has a magnitude; peft has no DoRA of parameters")
    experts, rows, cols = weight.shape
    rank = module.a.shape[0] // experts
    alpha = _alpha(module, adapter, experts)
    for expert in range(experts):
        parts = {
            name: tuple(region._replace(row=region.row - expert * rows) for region in regions)
            for name, regions in weight.parts.items()
            if regions[0].row // rows == expert
        }
        one = NativeTensor(weight.name, parts, (rows, cols))
        a, b = Rows(module.a, expert * rank, rank), EveryNth(module.b, expert, experts)
        yield Pair(one, a, b, alpha, f"{module.module}, expert {expert}")


def _alpha(module: ModuleAdapter, adapter: Adapter, experts: int) -> float:
    """As it counts when the product is divided by the rank."""
    path, rank = module_path(module.module), module.a.shape[0] // experts
    if rank != adapter.config.rank_of(path):
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has rank {rank}; its configuration says {adapter.config.rank_of(path)}",
            code="misshapen-tensor",
        )
    return adapter.config.alpha_of(path, rank)
