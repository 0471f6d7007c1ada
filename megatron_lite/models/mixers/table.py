"""All mixers by the words of the model description."""

from dataclasses import replace

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind
from megaconv.planning.mixers import mixer_word
from megatron_lite.models.mixers.attention import ATTENTION
from megatron_lite.models.mixers.declaration import Mixer
from megatron_lite.models.mixers.delta_net import DELTA_NET
from megatron_lite.models.mixers.kimi_delta import KIMI_DELTA
from megatron_lite.models.mixers.latent import LATENT
from megatron_lite.models.mixers.mamba import MAMBA
from megatron_lite.models.mixers.short_conv import SHORT_CONVOLUTION
from megatron_lite.models.mixers.side_by_side import SIDE_BY_SIDE
from megatron_lite.models.mixers.sparse import SPARSE

MIXERS: dict[str, Mixer | None] = {
    "attention": ATTENTION,
    "latent": LATENT,
    "sparse": SPARSE,
    "linear": DELTA_NET,
    "kda": KIMI_DELTA,
    "compressed": replace(ATTENTION, module=None),
    "mamba": MAMBA,
    "side_by_side": SIDE_BY_SIDE,
    "convolution": SHORT_CONVOLUTION,
    "none": None,
}
"""Words of LayerKind.mixer, `latent` for attention with latent vectors, and `sparse` if it also has an indexer -> the mixer.

None: the layer is only an MLP.
"""


def mixer_of(config: ModelConfig, kind: LayerKind) -> Mixer | None:
    """Return the mixer of a layer, or None if the layer has none."""
    return MIXERS[mixer_word(config, kind)]


def stays_in_float32(name: str) -> bool:
    """Return whether a mixer declares that this parameter stays in float32. name: the full name in the model."""
    last = name.rpartition(".")[2]
    return any(last in mixer.in_float32 for mixer in MIXERS.values() if mixer is not None)
