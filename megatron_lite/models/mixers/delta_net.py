"""The declaration of gated delta nets. Their cache holds the states of a convolution and of a recurrence."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.declaration import Mixer, PerRow
from megatron_lite.models.mixers.state_parameters import DELTA_NET_IN_FLOAT32

if TYPE_CHECKING:
    from megatron_lite.models.mixers.gated_delta_net import GatedDeltaNet


def _module() -> "type[GatedDeltaNet]":
    from megatron_lite.models.mixers.gated_delta_net import GatedDeltaNet

    return GatedDeltaNet


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerRow, PerRow]:
    linear = config.linear
    key_heads, value_heads = sizes["linear_key_heads"], sizes["linear_value_heads"]
    channels = 2 * key_heads * linear.key_dim + value_heads * linear.value_dim
    convolution = PerRow((channels, linear.conv - 1))
    return convolution, PerRow((value_heads, linear.key_dim, linear.value_dim), in_float32=True)


DELTA_NET = Mixer(
    module=_module,
    in_float32=DELTA_NET_IN_FLOAT32,
    cache=_cache,
    matrices=lambda _: ("out_proj", "in_proj"),
    cost=mixers.DELTA_NET,
)
