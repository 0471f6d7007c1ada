"""LoRA adapters as peft saves them, to be translated; what merges them into weights is `--adapter`.

Opened only where it is asked for by name: an adapter is no model, and whoever doesn't know that should hear of merging.
"""

from pathlib import Path

from megaconv.engine.adapters.peft_files import (
    CONFIG,
    Adapter,
    ModuleAdapter,
    adapter_directory,
    module_path,
    open_adapter,
)
from megaconv.engine.adapters.translation import Pair, linear_weights, open_pairs
from megaconv.errors import NotExpressible, TensorMismatch, UnknownFormat, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.check import listing
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor
from megaconv.options import LoadOptions

DESCRIPTION = "LoRA adapters of peft (adapter_config.json, adapter_model.safetensors), by name only; needs --config"


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
    weights = linear_weights(family, config, HF)
    pairs = (
        Pair(_weight_of(module, family, weights, adapter), module.a, module.b, _alpha(module, adapter), module.module)
        for module in adapter.modules
    )
    return open_pairs(
        family, config, pairs,
        base=adapter.config.base, dropout=adapter.config.dropout, source="peft, LoRA", where=str(adapter.weights),
    )  # fmt: skip


def _refuse_more_than_pairs(adapter: Adapter) -> None:
    """Raises NotExpressible for what has no place beside two matrices a module."""
    found = {
        "DoRA": adapter.config.dora,
        "whole tensors": bool(adapter.replaced),
        "lora_bias": any(module.bias is not None for module in adapter.modules),
        "an adapter of the embedding": any(module.embedding for module in adapter.modules),
        "adapters of parameters": bool(adapter.config.parameters),
    }
    there = [what for what, is_there in found.items() if is_there]
    if there:
        raise NotExpressible(
            f"{adapter.weights}: has {listing(there)}; only LoRA of linear layers is translated. "
            "megaconv merge BASE ADAPTER merges it into its base"
        )


def _weight_of(
    module: ModuleAdapter, family: Family, weights: dict[str, NativeTensor], adapter: Adapter
) -> NativeTensor:
    name = module_path(module.module) + ".weight"
    found = weights.get(name) or weights.get(family.prefix + name)
    if found is None:
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} is no linear layer of the model (experts, embedding and head are not translated)",
            code="unknown-tensor",
        )
    return found


def _alpha(module: ModuleAdapter, adapter: Adapter) -> float:
    """As it counts when the product is divided by the rank."""
    path, rank = module_path(module.module), module.a.shape[0]
    if rank != adapter.config.rank_of(path):
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has rank {rank}; its configuration says {adapter.config.rank_of(path)}",
            code="misshapen-tensor",
        )
    return adapter.config.alpha_of(path, rank)
