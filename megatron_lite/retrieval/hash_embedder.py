"""Embeds texts without a model: the sum of a fixed random vector of each word. For tests and demonstrations."""

from collections.abc import Sequence
from functools import lru_cache

import blake3
import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.retrieval.embedder import Vectors

WIDTH = 64
_SEED = b"megatron_lite/"


class HashEmbedder:
    """Vectors of length 1; zeros for a text without words. Texts with the same words have the same vector."""

    def __init__(self, width: int = WIDTH) -> None:
        if not 1 <= width <= 1 << 16:
            raise UsageError(f"hash:{width}: a width of 1 to 65536 was expected")
        self.name = f"hash:{width}"
        self.fingerprint = self.name
        self.width = width

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row] += word_vector(word, self.width)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.maximum(lengths, 1e-6)
        return vectors

    def count(self, text: str) -> int:
        return len(text.split())


@lru_cache(maxsize=1 << 16)
def word_vector(word: str, width: int) -> NDArray[np.float32]:
    """Return float32 [width] between -1 and 1. It depends on the word alone."""
    digest = blake3.blake3(_SEED + word.encode("utf-8", "surrogatepass")).digest(length=width)
    values = np.frombuffer(digest, np.uint8).astype(np.float32)
    return values / np.float32(127.5) - np.float32(1)
