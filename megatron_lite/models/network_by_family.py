"""The network class of each family."""

from collections.abc import Mapping

from megatron_lite.models.bert import Bert
from megatron_lite.models.biencoder import Biencoder
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.encoder_decoder import EncoderDecoder
from megatron_lite.models.network_interface import Network
from megatron_lite.models.retro import Retro

NETWORKS: Mapping[str, type[Network]] = {
    "bert": Bert,
    "biencoder": Biencoder,
    "retro": Retro,
    "t5": EncoderDecoder,
}
"""By family; all other families are decoders."""


def network(family: str) -> type[Network]:
    """Return the network class of a family."""
    return NETWORKS.get(family, ModelChunk)
