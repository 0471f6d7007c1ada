"""Rows of single tokens that are trained beside adapters, in the files of an adapter: peft's trainable_token_indices.

    base_model.model.<embedding or head>.token_adapter.trainable_tokens_delta   [tokens, hidden]: the rows themselves

A tied model has those of its embedding alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from formats.tensor import Box, LazyTensor
from megaconv.adapters.named_tensors import name_in_class
from megaconv.adapters.peft_files import Adapter
from megaconv.adapters.targets import changed_rows
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.held_tensor import HeldTensor
from megatron_lite.checkpoint.weights import read
from megatron_lite.checkpoint.whole_modules import as_floats
from megatron_lite.engine import Engine
from megatron_lite.models.lora.parameters import rows_name
from megatron_lite.models.lora.whole import MODULES, modules_of_tensors, whole_tensors
from megatron_lite.settings.options import LoRA

DELTA = ".token_adapter.trainable_tokens_delta"


def stored_rows(
    tensors: Mapping[str, Tensor], config: ModelConfig, options: LoRA
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (the rows by their names in transformers, the fields of adapter_config.json). tensors: by canonical name."""
    found, tokens = {}, {}
    for name, native in whole_tensors(config).items():
        (canonical,) = native.parts
        rows = tensors.get(rows_name(canonical))
        if rows is not None and native.copy is None:
            module = name_in_class(family(config.family), name).removesuffix(".weight")
            found[module + DELTA] = rows
            tokens[module.rpartition(".")[2]] = list(options.tokens_of(MODULES[canonical]))
    return found, {"trainable_token_indices": tokens} if tokens else {}


def read_token_rows(
    adapter: Adapter, config: ModelConfig
) -> tuple[dict[str, LazyTensor], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return (trained rows by name, LoRA.rows). Raises TensorMismatch, NotExpressible."""
    tensors: dict[str, LazyTensor] = {}
    modules: dict[str, tuple[int, ...]] = {}
    for canonical, found in changed_rows(adapter, family(config.family), config).items():
        order = sorted(range(len(found.tokens)), key=found.tokens.__getitem__)
        values = as_floats(found.values)[order]
        tensors[rows_name(canonical)] = HeldTensor(values)
        tokens = tuple(sorted(found.tokens))
        modules |= dict.fromkeys(modules_of_tensors(config, [canonical]), tokens)
    return tensors, tuple(sorted(modules.items()))


def rows_of_base(engine: Engine, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the base's rows of the tokens whose rows the engine trains, by name. weights: of the base, by canonical name."""
    options = engine.options.lora
    assert options is not None
    found: dict[str, LazyTensor] = {}
    for canonical, path in MODULES.items():
        tokens = options.tokens_of(path)
        if tokens and canonical in weights and canonical.endswith("weight"):
            hidden = engine.config.hidden
            rows = [read(weights[canonical], Box(token, token + 1, 0, hidden)) for token in tokens]
            found[rows_name(canonical)] = HeldTensor(torch.cat(rows).float())
    return found
