"""The declaration of attention and Mamba 2 side by side. Its cache holds keys and values, and the states of Mamba 2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.attention import ATTENTION
from megatron_lite.models.mixers.declaration import Kept, Mixer
from megatron_lite.models.mixers.mamba import MAMBA

if TYPE_CHECKING:
    from megatron_lite.models.mixers.attention_and_mamba import AttentionAndMamba


def _module() -> "type[AttentionAndMamba]":
    from megatron_lite.models.mixers.attention_and_mamba import AttentionAndMamba

    return AttentionAndMamba


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[Kept, ...]:
    return (*ATTENTION.cache(config, sizes), *MAMBA.cache(config, sizes))


def _matrices(config: ModelConfig) -> tuple[str, ...]:
    return tuple(
        f"{each.place}.{name}" for each in (ATTENTION, MAMBA) for name in each.matrices(config)
    )


SIDE_BY_SIDE = Mixer(
    module=_module,
    place="side_by_side",
    in_float32=MAMBA.in_float32,
    cache=_cache,
    matrices=_matrices,
    cost=mixers.SIDE_BY_SIDE,
)
