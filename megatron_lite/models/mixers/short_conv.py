"""The declaration of gated short convolutions. Their cache holds the last inputs of the convolution."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.declaration import Mixer, PerRow

if TYPE_CHECKING:
    from megatron_lite.models.mixers.gated_convolution import GatedConvolution


def _module() -> "type[GatedConvolution]":
    from megatron_lite.models.mixers.gated_convolution import GatedConvolution

    return GatedConvolution


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerRow]:
    return (PerRow((sizes["conv_channels"], config.convolution.width - 1)),)


SHORT_CONVOLUTION = Mixer(
    module=_module,
    place="short_conv",
    cache=_cache,
    matrices=lambda _: ("out_proj", "in_proj"),
    cost=mixers.CONVOLUTION,
)
