"""The declaration of sparse latent attention. Its cache holds the indexer's keys too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megatron_lite.models.mixers.declaration import PerToken
from megatron_lite.models.mixers.latent import LATENT

if TYPE_CHECKING:
    from megatron_lite.models.mixers.sparse_attention import SparseAttention


def _module() -> "type[SparseAttention]":
    from megatron_lite.models.mixers.sparse_attention import SparseAttention

    return SparseAttention


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerToken, ...]:
    keys, values = LATENT.cache(config, sizes)
    assert isinstance(keys, PerToken)
    assert isinstance(values, PerToken)
    return keys, values, PerToken(1, config.indexer.head_dim)


def _operations(config: ModelConfig, tokens: int) -> float:
    """Return the operations of attention's scores, and of the indexer's scores, which have no backward pass.

    Attention's scores are computed for all keys; those of keys that the indexer did not choose are hidden.
    """
    of_indexer = 2.0 * config.indexer.heads * config.indexer.head_dim * tokens
    return LATENT.operations(config, tokens) + of_indexer


SPARSE = replace(LATENT, module=_module, cache=_cache, operations=_operations)
