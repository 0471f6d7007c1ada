"""Keys and values of many rows, each in a slot of memory that is taken once: what models/cache.py asks for, for rows that differ."""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """One tensor a layer for keys and one for values, [slots, heads, length, width]; made when a layer first comes by."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: slice | Tensor = slice(0)
        """The slots of the next pass."""
        self._new: tuple[slice, slice] | tuple[Tensor, Tensor] = slice(0), slice(0)
        """Where its tokens go: places and slots, of slots side by side that start alike, or of each token, [tokens, rows]."""
        self._end = 0

    def select(self, slots: Sequence[int], starts: Sequence[int], tokens: int, device: torch.device) -> Tensor:
        """The slots of the next pass, in the order of its rows, each of which has its next `tokens` tokens at its own start.

        The positions of these, int64 [rows or 1, tokens]: one row where all start alike.
        """
        first, alike = slots[0], len(set(starts)) == 1
        side_by_side = all(slot == first + number for number, slot in enumerate(slots))
        rows = torch.tensor(slots, device=device)
        positions = torch.tensor(starts[:1] if alike else starts, device=device).unsqueeze(1)
        positions = positions + torch.arange(tokens, device=device)
        self._end = max(starts) + tokens
        # Slots side by side need no copy when they are read; others do, of what they have so far.
        self._rows = slice(first, first + len(slots)) if side_by_side else rows
        if alike and isinstance(self._rows, slice):
            self._new = slice(self._end - tokens, self._end), self._rows
        else:
            self._new = positions.t().expand(-1, len(slots)), rows
        return positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As models/cache.py says; k, v: of the rows that were selected."""
        if layer not in self._kept:
            self._kept[layer] = self._room(k), self._room(v)
        keys, values = (self._put(whole, new) for whole, new in zip(self._kept[layer], (k, v), strict=True))
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int], used: int) -> None:
        """Every target gets the first `used` tokens that its source had before any of them changed."""
        for kept in self._kept.values():
            for whole in kept:
                whole[list(targets), :, :used] = whole[list(sources), :, :used]

    def forget(self, slots: Sequence[int]) -> None:
        """Zeros in their place: what is masked counts for nothing only if it is a number."""
        for kept in self._kept.values():
            for whole in kept:
                whole[list(slots)] = 0

    def bytes(self) -> int:
        return sum(whole.nbytes for kept in self._kept.values() for whole in kept)

    def _room(self, new: Tensor) -> Tensor:
        _, _, heads, width = new.shape
        return new.new_zeros(self.slots, heads, self.length, width)

    def _put(self, whole: Tensor, new: Tensor) -> Tensor:
        """new [tokens, rows, heads, width] into their slots -> all of these rows, [end, rows, heads, width]."""
        whole.permute(2, 0, 1, 3)[self._new] = new
        return whole[self._rows, :, : self._end].permute(2, 0, 1, 3)
