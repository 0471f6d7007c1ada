"""LoRA and DoRA adapters of peft, for translation. (`--adapter` merges an adapter into weights.)

The loader has to be selected by name. An adapter is not a model, and a user who gives one by mistake should learn about
merging.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from formats.rows import Rows
from formats.wording import listing
from megaconv.adapters.derived import EveryNth
from megaconv.adapters.opening import open_adapter
from megaconv.adapters.peft_files import (
    CONFIG,
    Adapter,
    ModuleAdapter,
    adapter_directory,
)
from megaconv.adapters.sharing import with_shared
from megaconv.adapters.targets import path_of, weights_of
from megaconv.adapters.translation import Pair, adaptable_weights, open_pairs
from megaconv.errors import NotExpressible, TensorMismatch, UnknownFormat, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.loader import Loader
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import PLAIN
from megaconv.options import LoadOptions


def detect(path: Path) -> bool:
    return False


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open an adapter. Raises CheckpointError if it is incomplete, belongs to another model, or has more than pairs of
    matrices."""
    path = adapter_directory(path)
    if not (path / CONFIG).is_file():
        raise UnknownFormat(
            f"{path}: has no {CONFIG}; expected a directory as peft's save_pretrained leaves it"
        )
    adapter = open_adapter(path)
    if options.config is None:
        base = (
            f", {adapter.config.base!r} by the adapter's configuration"
            if adapter.config.base
            else ""
        )
        raise UsageError(
            f"{path}: an adapter doesn't describe its base model; give --config with the base model's Hugging Face directory{base}",
            code="config-needed",
        )
    family, config = read_config(options.config / CONFIG_NAME)
    _refuse_more_than_pairs(adapter)
    known = adaptable_weights(family, config, HF)
    modules = weights_of(adapter, family, config)
    pairs = chain.from_iterable(
        _pairs(module, weight, known, adapter) for module, weight in modules
    )
    opened = open_pairs(
        config, pairs,
        base=adapter.config.base, dropout=adapter.config.dropout, source=f"peft, {_kind(adapter)}", where=str(adapter.weights),
    )  # fmt: skip
    return opened if options.metadata_only else with_shared(opened, family)


def _kind(adapter: Adapter) -> str:
    return "DoRA" if adapter.config.dora else "LoRA"


def _refuse_more_than_pairs(adapter: Adapter) -> None:
    """Raise NotExpressible for parts of an adapter that are not pairs of matrices of a module."""
    found = {
        "whole tensors": bool(adapter.replaced),
        "rows of single tokens": bool(adapter.tokens),
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
    """Yield the matrices of one module: one pair, or one for each expert if one parameter holds all experts of a layer."""
    module.refuse_contradiction(adapter.config, adapter.weights)
    if len(weight.shape) == 3:
        yield from _of_experts(module, weight, adapter)
    elif weight.name in known:
        yield Pair(
            weight,
            module.a,
            module.b,
            _alpha(module, weight, adapter),
            module.module,
            module.magnitude,
        )
    else:
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} is no linear layer of the model's own layers; embedding, head and layers for multi-token "
            "prediction are not translated. megaconv merge BASE ADAPTER merges it into its base",
            code="unknown-tensor",
        )


def _of_experts(module: ModuleAdapter, weight: NativeTensor, adapter: Adapter) -> Iterator[Pair]:
    """Yield one pair per expert from the adapter of a parameter that holds all experts.

    A is [experts * r, in] and has a range of rows for each expert. B is [out, r * experts], and every experts-th column
    belongs to one expert.
    """
    if any(region.order != PLAIN for regions in weight.parts.values() for region in regions):
        raise NotExpressible(
            f"{adapter.weights}: {module.module} is an adapter of experts that {weight.name} holds transposed or interleaved, which "
            "isn't translated. megaconv merge BASE ADAPTER merges it into its base"
        )
    if module.magnitude is not None:
        raise NotExpressible(
            f"{adapter.weights}: {module.module} has a magnitude; peft has no DoRA of parameters"
        )
    experts, rows, cols = weight.shape
    rank = module.a.shape[0] // experts
    alpha = _alpha(module, weight, adapter)
    for expert in range(experts):
        parts = {}
        for name, regions in weight.parts.items():
            if regions[0].row // rows == expert:
                own = [region._replace(row=region.row - expert * rows) for region in regions]
                parts[name] = tuple(own)
        one = NativeTensor(weight.name, parts, (rows, cols))
        a, b = Rows(module.a, expert * rank, rank), EveryNth(module.b, expert, experts)
        yield Pair(one, a, b, alpha, f"{module.module}, expert {expert}")


def _alpha(module: ModuleAdapter, weight: NativeTensor, adapter: Adapter) -> float:
    """The alpha of a module, for a product that is divided by its rank."""
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    path, rank = path_of(module, weight, adapter.config), module.a.shape[0] // experts
    if rank != adapter.config.rank_of(path):
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has rank {rank}; its configuration says {adapter.config.rank_of(path)}",
            code="misshapen-tensor",
        )
    return adapter.config.alpha_of(path, rank)


LOADER = Loader(
    name="peft",
    description="LoRA and DoRA adapters of peft (adapter_config.json, adapter_model.safetensors), by name only; needs --config",
    detect=detect,
    open=open,
    reads_files=False,
)
