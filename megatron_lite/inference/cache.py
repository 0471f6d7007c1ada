"""A cache (see models/cache.py) for many rows of different lengths. Each row has a slot in memory that is allocated once."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.models.mixers.declaration import Kept, PerRow, PerToken


class SlotCache:
    """The parts that each layer's mixer declares, for all slots: [slots, heads, length, width] or [slots, ...]."""

    def __init__(
        self,
        declared: Mapping[int, Sequence[Kept]],
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """declared: the parts of a row's cache, by layer. dtype: of the model."""
        self.slots, self.length = slots, length
        self._device = device
        self._growing: dict[int, list[Tensor]] = {}
        self._states: dict[int, list[Tensor]] = {}
        self._saved: dict[int, list[Tensor]] = {}
        """Like _states; empty until states are saved."""
        for layer, parts in declared.items():
            growing = [part for part in parts if isinstance(part, PerToken)]
            states = [part for part in parts if isinstance(part, PerRow)]
            self._growing[layer] = [
                torch.zeros(slots, part.heads, length, part.width, dtype=dtype, device=device)
                for part in growing
            ]
            self._states[layer] = [
                torch.zeros(
                    slots,
                    *part.shape,
                    dtype=torch.float32 if part.in_float32 else dtype,
                    device=device,
                )
                for part in states
            ]
        self._rows: slice | Tensor = slice(0)
        """The slots of the next pass."""
        self._new: tuple[slice, slice] | tuple[Tensor, Tensor] = slice(0), slice(0)
        """The places of the new tokens, as (positions, slots).

        Adjacent slots with equal starts: two slices. Other slots: index tensors [tokens, rows].
        """
        self._end = 0

    def select(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: int,
        device: torch.device,
        *,
        keeps_states: bool = False,
    ) -> Tensor:
        """Select the slots of the next pass, in the order of its rows. Each row has its next `tokens` tokens at its own start.

        keeps_states: True if a row that starts at 0 keeps its states, because the pass has layers without states only.
        Returns the positions of these tokens, int64 [rows or 1, tokens]; one row if all starts are equal.
        Raises ValueError if a slot has no room for them.
        """
        self._grow_to(max(starts) + tokens)
        if not keeps_states:
            new_rows = [slot for slot, start in zip(slots, starts, strict=True) if start == 0]
            self._begin(new_rows)
        alike = len(set(starts)) == 1
        distinct = starts[:1] if alike else starts
        firsts = torch.tensor(distinct, device=device)
        offsets = torch.arange(tokens, device=device)
        positions = firsts.unsqueeze(1) + offsets
        self._choose(slots, positions, alike=alike)
        return positions

    def select_next(self, positions: Tensor, end: int) -> None:
        """Select the next token of each selected row, for a pass that has layers without states only. Nothing is copied to a GPU.

        positions: of these tokens, int64 [rows, 1] on the device. end: number of tokens of the longest row.
        Raises ValueError if a slot has no room for them.
        """
        self._grow_to(end)
        rows = self._rows
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self._device)
        self._new = positions.t(), rows

    def _grow_to(self, end: int) -> None:
        """Let the next pass read this number of tokens of each row."""
        if end > self.length:
            raise ValueError(f"{end} tokens don't fit into a cache of {self.length}")
        self._end = end

    def _choose(self, slots: Sequence[int], positions: Tensor, *, alike: bool) -> None:
        """Set the places that the next pass reads and writes. alike: whether all rows have the same positions."""
        # Adjacent slots are read as a view. Other slots are copied, up to their present end.
        adjacent = slice(slots[0], slots[0] + len(slots)) if _adjacent(slots) else None
        if alike and adjacent is not None:
            tokens = positions.shape[1]
            self._rows = adjacent
            self._new = slice(self._end - tokens, self._end), adjacent
            return
        rows = torch.tensor(slots, device=positions.device)
        self._rows = rows if adjacent is None else adjacent
        self._new = positions.t().expand(-1, len(slots)), rows

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """See Cache.append. new: of the selected rows."""
        return tuple(
            self._put(whole, part) for whole, part in zip(self._growing[layer], new, strict=True)
        )

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """See Cache.states: of the selected rows."""
        return tuple(whole[self._rows] for whole in self._states[layer])

    def keep(self, layer: int, *states: Tensor) -> None:
        """See Cache.keep: of the selected rows."""
        for whole, state in zip(self._states[layer], states, strict=True):
            whole[self._rows] = state

    def copy(self, sources: Sequence[int], targets: Sequence[int], used: int) -> None:
        """Copy the first `used` tokens of every source to its target. Sources are read before any target changes."""
        to, of = self._index(targets), self._index(sources)
        for whole in _all(self._growing):
            whole[to, :, :used] = whole[of, :, :used]
        for whole in _all(self._states):
            whole[to] = whole[of]

    def save(self, slots: Sequence[int]) -> None:
        """Save the states of these slots, in place of those that were saved before."""
        index = self._index(slots)
        for layer, states in self._states.items():
            if layer not in self._saved:
                self._saved[layer] = [torch.empty_like(whole) for whole in states]
            for saved, whole in zip(self._saved[layer], states, strict=True):
                saved[index] = whole[index]

    def restore(self, slots: Sequence[int]) -> None:
        """Give these slots their saved states again."""
        if not slots:
            return
        index = self._index(slots)
        for layer, states in self._states.items():
            for saved, whole in zip(self._saved[layer], states, strict=True):
                whole[index] = saved[index]

    def forget(self, slots: Sequence[int]) -> None:
        """Set the slots to zero. If a masked key were NaN, it would still change the result."""
        index = self._index(slots)
        for whole in (*_all(self._growing), *_all(self._states)):
            whole[index] = 0

    def bytes(self) -> int:
        """Return the memory of the cache."""
        return sum(whole.nbytes for whole in (*_all(self._growing), *_all(self._states)))

    def _begin(self, slots: Sequence[int]) -> None:
        """Set the states of slots in which a row begins to zero. Parts that grow are written before they are read."""
        if not slots or not any(self._states.values()):
            return
        index = self._index(slots)
        for whole in _all(self._states):
            whole[index] = 0

    def _index(self, slots: Sequence[int]) -> Tensor:
        """Return int64 [slots] on the device, for all layers: each list of numbers would be copied to the device again."""
        return torch.tensor(list(slots), dtype=torch.int64, device=self._device)

    def _put(self, whole: Tensor, new: Tensor) -> Tensor:
        """Store `new` [tokens, rows, heads, width] in the slots. Returns the selected rows, [end, rows, heads, width]."""
        whole.permute(2, 0, 1, 3)[self._new] = new
        return whole[self._rows, :, : self._end].permute(2, 0, 1, 3)


def _adjacent(slots: Sequence[int]) -> bool:
    return list(slots) == list(range(slots[0], slots[0] + len(slots)))


def _all(kept: Mapping[int, Sequence[Tensor]]) -> Iterator[Tensor]:
    for of_layer in kept.values():
        yield from of_layer
