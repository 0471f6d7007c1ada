"""Two subjects of a model's description (described.py): attention to retrieved text (Retro), and retrievers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Retrieval:
    """Retro (arXiv 2112.04426): some layers attend to retrieved text, the neighbors of each chunk of a sequence. All
    sizes are 0 in models without it."""

    layers: int = 0
    """Number of layers of the encoder, which reads the neighbors."""
    chunk: int = 0
    """Tokens of a chunk."""
    neighbors: int = 0
    """Neighbors of a chunk."""
    chunks: int = 0
    """Chunks of a neighbor: the retrieved one, and those that follow it."""

    @property
    def retrieved(self) -> int:
        """Tokens of a neighbor."""
        return self.chunk * self.chunks


def retrieving_layers(layers: int) -> range:
    """The layers that attend to retrieved text, of a model with this number of layers. Source: megatron-core 0.15.3."""
    return range(8 if layers > 15 else 5, layers, 3)


@dataclass(frozen=True)
class Retriever:
    """The towers of a biencoder, which embeds queries and contexts. All other fields describe one tower: a BERT."""

    towers: str = ""
    """`separate` (one tower for queries, one for contexts), `shared` (one for both); empty if the model is no biencoder."""
    projection: int = 0
    """Width of an embedding; 0 if an embedding is the first token's activations, without a projection."""
    pooler: bool = False
    """True if a pooler (dense, tanh) is in front of the projection."""
