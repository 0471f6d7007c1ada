"""The declaration of latent attention. Its cache holds the keys and values that come from the latent vectors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind
from megatron_lite.models.mixers.attention import operations_of_scores
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


def _elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the latent vectors, q, k and v as they are made and as attention takes them, and attention's output."""
    attention, latent = config.attention, config.latent
    q, values = attention.heads * attention.head_dim, attention.heads * latent.v_dim
    latents = latent.q_rank + latent.kv_rank + latent.rope_dim
    return 2 * q + q + values + latents + values


def _input_width(config: ModelConfig) -> int:
    """Return the widths of the inputs of both matrices that project up."""
    return (config.latent.q_rank or config.hidden) + config.latent.kv_rank


LATENT = Mixer(
    module=_module,
    needs_norm=True,
    cache=_cache,
    matrices=_matrices,
    attends=True,
    elements=_elements,
    operations=operations_of_scores,
    input_width=_input_width,
    shared_width=lambda config: config.latent.rope_dim,
)
