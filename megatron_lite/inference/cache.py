"""Keys and values of many rows, each in a slot of memory that is taken once: what models/cache.py asks for, for rows that differ."""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """One tensor a layer for keys and one for values, [slots, heads, length, width]; made when a layer first comes by."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._run: slice | None = None
        self._end = 0

    def select(self, slots: Sequence[int], end: int, device: torch.device) -> None:
        """The slots of the next pass, in the order of its rows. end: the most tokens that one of them will have then."""
        neighbours = all(slot == slots[0] + number for number, slot in enumerate(slots))
        self._run = slice(slots[0], slots[0] + len(slots)) if neighbours else None
        self._rows = torch.tensor(slots, device=device)
        self._end = end

    def append(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As models/cache.py says; k, v: of the rows that were selected."""
        if layer not in self._kept:
            self._kept[layer] = self._room(k), self._room(v)
        keys, values = (self._put(whole, new, positions) for whole, new in zip(self._kept[layer], (k, v), strict=True))
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int], used: int) -> None:
        """Every target gets the first `used` tokens that its source had before any of them changed."""
        for kept in self._kept.values():
            for whole in kept:
                whole[list(targets), :, :used] = whole[list(sources), :, :used]

    def bytes(self) -> int:
        return sum(whole.nbytes for kept in self._kept.values() for whole in kept)

    def _room(self, new: Tensor) -> Tensor:
        _, _, heads, width = new.shape
        return new.new_zeros(self.slots, heads, self.length, width)

    def _put(self, whole: Tensor, new: Tensor, positions: Tensor) -> Tensor:
        """new [tokens, rows, heads, width] into their slots -> all of these rows, [end, rows, heads, width]."""
        whole.permute(2, 0, 1, 3)[positions.expand(new.shape[:2]), self._rows] = new
        rows = whole[:, :, : self._end]
        # Slots side by side need no copy; others do, of what they have so far.
        rows = rows[self._run] if self._run is not None else rows.index_select(0, self._rows)
        return rows.permute(2, 0, 1, 3)
