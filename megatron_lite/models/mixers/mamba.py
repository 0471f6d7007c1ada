"""The declaration of Mamba 2. Its cache holds the states of a convolution and of a recurrence.

The trainer can't compute it yet; `plan` describes it.
"""

from collections.abc import Mapping

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind
from megatron_lite.models.mixers.declaration import Mixer, PerRow

CONVOLUTION = 4
"""Positions of the convolution, including the token's own."""


def _cache(config: ModelConfig, sizes: Mapping[str, int]) -> tuple[PerRow, PerRow]:
    mamba, heads = config.mamba, sizes["mamba_heads"]
    channels = heads * mamba.head_dim + 2 * sizes["mamba_groups"] * mamba.state
    convolution = PerRow((channels, CONVOLUTION - 1))
    return convolution, PerRow((heads, mamba.head_dim, mamba.state), in_float32=True)


def _elements(config: ModelConfig, _: LayerKind) -> float:
    mamba = config.mamba
    inner, states = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return 2 * (inner + states) + 2 * inner


def _operations(config: ModelConfig, _: int) -> float:
    """Return the operations on the state: it decays, is updated, and is read."""
    mamba = config.mamba
    return 3 * 5.0 * mamba.heads * mamba.head_dim * mamba.state


MAMBA = Mixer(
    module=None,
    place="mixer",
    in_float32=frozenset({"A_log", "dt_bias", "D"}),
    cache=_cache,
    matrices=lambda _: ("out_proj", "in_proj"),
    elements=_elements,
    operations=_operations,
    input_width=lambda config: config.hidden,
)
