"""Which network a family's is: the one place where a kind of model names what it computes."""

from collections.abc import Mapping

from megatron_lite.models.bert import Bert
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.encoder_decoder import EncoderDecoder
from megatron_lite.models.network import Network

NETWORKS: Mapping[str, type[Network]] = {"bert": Bert, "t5": EncoderDecoder}
"""By family; all others are decoders."""


def network(family: str) -> type[Network]:
    return NETWORKS.get(family, ModelChunk)
