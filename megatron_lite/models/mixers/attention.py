"""The declaration of plain attention, whose cache holds keys and values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind
from megatron_lite.models.mixers.declaration import Mixer, PerToken

if TYPE_CHECKING:
    from megatron_lite.models.mixers.self_attention import SelfAttention


def _module() -> "type[SelfAttention]":
    from megatron_lite.models.mixers.self_attention import SelfAttention

    return SelfAttention


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerToken, PerToken]:
    keys = PerToken(sizes["kv_heads"], config.attention.head_dim)
    return keys, keys


def _elements(config: ModelConfig, kind: LayerKind) -> float:
    """Return the fused product, the inputs of attention (keys again if they rotate) and its output."""
    attention = config.attention
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    rotated = kv if kind.rotates and config.positions.kind == "rope" else 0
    return (q + 2 * kv) + q + rotated + q


def operations_of_scores(config: ModelConfig, tokens: int) -> float:
    """Return the operations of scores and weighted sums: 12 h s. They are not halved for the mask."""
    return 12.0 * config.attention.heads * config.attention.head_dim * tokens


ATTENTION = Mixer(
    module=_module,
    cache=_cache,
    matrices=lambda _: ("linear_proj", "linear_qkv"),
    attends=True,
    elements=_elements,
    operations=operations_of_scores,
    input_width=lambda config: config.hidden,
)
