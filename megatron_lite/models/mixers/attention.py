"""The declaration of plain attention, whose cache holds keys and values."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.declaration import Mixer, PerToken

if TYPE_CHECKING:
    from megatron_lite.models.mixers.self_attention import SelfAttention


def _module() -> "Callable[..., SelfAttention]":
    from megatron_lite.models.mixers.shared_attention import attention

    return attention


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerToken, PerToken]:
    attention, heads = config.attention, sizes["kv_heads"]
    return PerToken(heads, attention.head_dim), PerToken(heads, attention.value_dim)


ATTENTION = Mixer(
    module=_module,
    cache=_cache,
    matrices=lambda _: ("linear_proj", "linear_qkv"),
    cost=mixers.ATTENTION,
)
