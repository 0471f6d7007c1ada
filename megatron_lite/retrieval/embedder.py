"""The interfaces of embedders: texts to vectors, whose inner products or distances are searched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""float32 [rows, width]"""


class Passage(NamedTuple):
    """A text that can be found."""

    id: int
    text: str
    title: str = ""
    tokens: NDArray[np.int64] | None = None
    """The complete row of the context tower, if the passage comes from indexed data."""


class Embedder(Protocol):
    """Embeds passages and queries; the two may have towers of their own."""

    @property
    def name(self) -> str:
        """The embedder as the flag names it. The name is stored beside the vectors."""
        ...

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal vectors."""
        ...

    def passages(self, rows: Sequence[Passage]) -> Vectors:
        """Return the vectors of passages."""
        ...

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of questions."""
        ...


class TextEmbedder(Protocol):
    """Embeds any text in the same way."""

    name: str
    width: int
    fingerprint: str

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts. An empty text has a vector too."""
        ...

    def count(self, text: str) -> int:
        """Return the number of the embedder's tokens in a text. Retro leaves out chunks without tokens."""
        ...


@dataclass(frozen=True)
class OneTower:
    """A text embedder for passages and queries alike. A title precedes its text."""

    inner: TextEmbedder

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def passages(self, rows: Sequence[Passage]) -> Vectors:
        return self.inner.embed([f"{row.title} {row.text}".strip() for row in rows])

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self.inner.embed(texts)
