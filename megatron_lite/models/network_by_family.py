"""The network class of each model."""

from collections.abc import Mapping

from megaconv.model.config import ModelConfig
from megatron_lite.models.bert import Bert
from megatron_lite.models.biencoder import Biencoder
from megatron_lite.models.carrying import CarryingChunk
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.encoder_decoder import EncoderDecoder
from megatron_lite.models.network_interface import Network
from megatron_lite.models.retro import Retro
from megatron_lite.models.trainable import carries

NETWORKS: Mapping[str, type[Network]] = {
    "bert": Bert,
    "biencoder": Biencoder,
    "retro": Retro,
    "t5": EncoderDecoder,
}
"""By family; all other families are decoders."""


def network(config: ModelConfig) -> type[Network]:
    """Return the network class of a model."""
    return NETWORKS.get(config.family, CarryingChunk if carries(config) else ModelChunk)
