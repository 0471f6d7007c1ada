"""A Retro that generates with the neighbors of each chunk. Chunks count from the start of the text, as in training.

The model computes the whole text again for each token.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.inference.slots import Recomputed
from megatron_lite.models.batch import Microbatch

FindNeighbors = Callable[[Sequence[int]], Tensor]
"""Tokens of a row -> int64 [whole chunks * neighbors, tokens of a neighbor], the neighbors of its whole chunks in order."""


class RetrievingModel(Recomputed):
    """A LanguageModel (slots.py) in one process, whose rows have neighbors."""

    def __init__(self, engine: Engine, find: FindNeighbors, slots: int, length: int) -> None:
        """length: tokens of the longest row."""
        super().__init__(lambda rows: list(self._logits_of(rows)), slots, length)
        self.engine, self._find = engine, find

    def _logits_of(self, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield float32 [tokens, vocabulary] for each row."""
        device = self.engine.grid.device
        for row in rows:
            tokens = torch.tensor([row], device=device)
            source = self._find(row).to(device)
            found = self.engine.logits(Microbatch(tokens, tokens, source=source))
            assert found is not None, "Retro has one pipeline stage"
            yield found[0]


def same_for_all(passages: Tensor, chunk: int) -> FindNeighbors:
    """Return a function that gives all chunks the same neighbors.

    passages: int64 [neighbors, tokens of a neighbor]. chunk: tokens of a chunk.
    """
    return lambda row: passages.repeat(len(row) // chunk, 1)
