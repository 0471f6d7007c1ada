"""The declaration of latent attention. Its cache holds the keys and values that come from the latent vectors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.declaration import Mixer, PerToken

if TYPE_CHECKING:
    from megatron_lite.models.mixers.latent_attention import LatentAttention


def _module() -> "type[LatentAttention]":
    from megatron_lite.models.mixers.latent_attention import LatentAttention

    return LatentAttention


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerToken, PerToken]:
    heads = sizes["heads"]
    return PerToken(heads, config.attention.head_dim), PerToken(heads, config.latent.v_dim)


def _matrices(config: ModelConfig) -> tuple[str, ...]:
    of_queries = (
        ("linear_q_down_proj", "linear_q_up_proj") if config.latent.q_rank else ("linear_q_proj",)
    )
    return ("linear_proj", *of_queries, "linear_kv_down_proj", "linear_kv_up_proj")


LATENT = Mixer(
    module=_module,
    cache=_cache,
    matrices=_matrices,
    cost=mixers.LATENT,
)
