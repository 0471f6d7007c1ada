"""The chunks of a sequence that attend to retrieved text, and the tokens that see the neighbors of each chunk.

Token t sees the neighbors of chunk floor((t + 1) / m) - 1, counted from the start: the neighbors of a chunk were found
with all of its tokens, so that only its last token, and the tokens after it, may see them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """The division of a sequence. Tensors are [sequence, batch, hidden]; a chunk has `size` tokens."""

    length: int
    """Tokens of the sequence."""
    size: int
    count: int
    """Chunks with neighbors."""

    @property
    def first(self) -> int:
        """Tokens of the first chunk.

        If a sequence ends with a part of a chunk, and this part has no neighbors, all chunks are whole. If there are
        neighbors for one chunk more, the chunks are aligned to the end, as Megatron core aligns them: the first chunk
        is the part.
        """
        rest = self.length % self.size
        return rest if rest and self.count * self.size > self.length else self.size

    def of(self, x: Tensor) -> Tensor:
        """Return the chunks [size, batch * count, hidden]. A short first chunk has zeros behind it."""
        batch, hidden = x.shape[1:]
        short = self.size - self.first
        if short:
            first = F.pad(x[: self.first], (0, 0, 0, 0, 0, short))
            x = torch.cat([first, x[self.first :]])
        whole = x[: self.count * self.size]
        return self._by_row(whole, batch, hidden)

    def seeing(self, x: Tensor) -> Tensor:
        """Return the tokens that see neighbors, by chunk, [size, batch * count, hidden], with zeros at the end."""
        batch, hidden = x.shape[1:]
        tokens = x[self.first - 1 :]
        missing = self.count * self.size - len(tokens)
        return self._by_row(F.pad(tokens, (0, 0, 0, 0, 0, missing)), batch, hidden)

    def placed(self, found: Tensor, batch: int) -> Tensor:
        """The inverse of `seeing`: [length, batch, hidden], with zeros for the tokens that see no neighbors."""
        hidden = found.shape[-1]
        tokens = found.view(self.size, batch, self.count, hidden).permute(2, 0, 1, 3)
        tokens = tokens.reshape(self.count * self.size, batch, hidden)
        before = F.pad(tokens, (0, 0, 0, 0, self.first - 1, 0))
        return before[: self.length]

    def _by_row(self, x: Tensor, batch: int, hidden: int) -> Tensor:
        """[count * size, batch, hidden] -> [size, batch * count, hidden]."""
        chunks = x.view(self.count, self.size, batch, hidden).permute(1, 2, 0, 3)
        return chunks.reshape(self.size, batch * self.count, hidden)
