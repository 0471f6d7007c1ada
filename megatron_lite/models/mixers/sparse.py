"""The declaration of sparse latent attention. Its cache holds the indexer's keys too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
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


SPARSE = replace(LATENT, module=_module, cache=_cache, cost=mixers.SPARSE)
