"""The declaration of Mamba 2. Its cache holds the states of a convolution and of a recurrence."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaconv.model.config import ModelConfig
from megaconv.planning import mixers
from megatron_lite.models.mixers.declaration import Mixer, PerRow
from megatron_lite.models.mixers.state_parameters import CONVOLUTION, MAMBA_IN_FLOAT32

if TYPE_CHECKING:
    from megatron_lite.models.mixers.mamba_mixer import MambaMixer


def _module() -> "type[MambaMixer]":
    from megatron_lite.models.mixers.mamba_mixer import MambaMixer

    return MambaMixer


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerRow, PerRow]:
    mamba, heads = config.mamba, sizes["mamba_heads"]
    channels = heads * mamba.head_dim + 2 * sizes["mamba_groups"] * mamba.state
    convolution = PerRow((channels, CONVOLUTION - 1))
    return convolution, PerRow((heads, mamba.head_dim, mamba.state), in_float32=True)


MAMBA = Mixer(
    module=_module,
    place="mixer",
    in_float32=MAMBA_IN_FLOAT32,
    cache=_cache,
    matrices=lambda _: ("out_proj", "in_proj"),
    cost=mixers.MAMBA,
)
