"""Rows of single tokens that are trained beside adapters, in the files of an adapter: peft's trainable_token_indices.

    base_model.model.<embedding or head>.token_adapter.trainable_tokens_delta   [tokens, hidden]: the rows themselves

A tied model has those of its embedding alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from formats.tensor import Box, LazyTensor
from megaconv.adapters.peft_files import Adapter
from megaconv.adapters.targets import changed_rows
from megaconv.families import family
from megaconv.huggingface.stored_names import name_in_class
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
        # Of a token that is listed twice, peft takes the last row.
        last = {token: number for number, token in enumerate(found.tokens)}
        tokens = tuple(sorted(last))
        values = as_floats(found.values)[[last[token] for token in tokens]]
        tensors[rows_name(canonical)] = HeldTensor(values)
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
            parts = [
                read(weights[canonical], Box(first, last + 1, 0, hidden))
                for first, last in _runs(tokens)
            ]
            found[rows_name(canonical)] = HeldTensor(torch.cat(parts).float())
    return found


def _runs(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last token of each run of consecutive tokens. tokens: in ascending order."""
    numbered = enumerate(tokens)
    for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        found = [token for _, token in run]
        yield found[0], found[-1]
