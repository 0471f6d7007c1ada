"""The slots of requests, and the number of a request's tokens that a slot already holds.

A slot keeps its row after the request has ended. A request whose prompt begins with the same tokens, such as the next
turn of a conversation or another question after the same system prompt, continues that row or a copy of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.inference.slots import LanguageModel

LEAST_REUSED = 16
"""Fewest common tokens for which a row is reused. Every prompt may begin with the same begin token."""


class Held(NamedTuple):
    """Tokens whose keys, values or states a slot holds."""

    tokens: Sequence[int] = ()
    adapter: int | None = None


@dataclass(frozen=True)
class _Match:
    slot: int
    count: int
    """Number of common tokens."""
    whole: bool
    """True if these are all tokens of the slot."""


class FreeSlots:
    """The free slots of a model."""

    def __init__(self, model: LanguageModel, *, reuse: bool) -> None:
        """reuse: False if every request begins with an empty slot. Then the lowest free slot comes first."""
        self._model, self._reuse = model, reuse
        self._free: dict[int, Held] = {slot: Held() for slot in range(model.slots)}
        """The slot that has been free for the longest time comes first."""
        self.reused_tokens = 0
        """Number of tokens of prompts that were not computed again."""

    def take(
        self,
        prompt: Sequence[int],
        adapter: int | None,
        running: Callable[[], Mapping[int, Held]],
    ) -> tuple[int, int] | None:
        """Return (slot, number of the prompt's tokens in it), or None if no slot is free.

        running: returns the rows of slots that are not free. Most calls, which find no free slot, don't need them.
        """
        if not self._free:
            return None
        found = self._best(prompt, adapter, {**running(), **self._free}) if self._reuse else None
        slot = None if found is None else self._slot_for(found)
        if found is None or slot is None:
            slot = self._next()
            del self._free[slot]
            return slot, 0
        if slot != found.slot:
            self._model.copy([found.slot], [slot])
        del self._free[slot]
        self.reused_tokens += found.count
        return slot, found.count

    def take_several(self, count: int) -> tuple[int, ...]:
        """Return `count` slots among which rows can be copied, or () if too few are free."""
        free = sorted(slot for slot in self._free if slot in self._model.copied)[:count]
        if len(free) < count:
            return ()
        for slot in free:
            del self._free[slot]
        return tuple(free)

    def give_back(self, slot: int, held: Held) -> None:
        """Free a slot."""
        self._free[slot] = held

    def forget(self) -> None:
        """Forget the rows of all free slots, after something else has used them."""
        self._free = {slot: Held() for slot in sorted(self._free)}

    def _next(self) -> int:
        """Return the slot for a new row: an empty one if there is one, else the one whose row was used least recently."""
        empty = [slot for slot, held in self._free.items() if not held.tokens]
        if not self._reuse or empty:
            return min(empty or self._free)
        return next(iter(self._free))

    def _slot_for(self, found: _Match) -> int | None:
        """Return the free slot that continues a row, or None.

        A row of which only a part is continued stays in its slot, and the part is copied, if there is an empty slot.
        """
        following = self._next()
        copied = self._model.copied
        can_copy = found.slot in copied and following in copied
        if found.slot in self._free:
            follows_another = bool(self._free[following].tokens)
            if found.whole or follows_another or not can_copy:
                return found.slot
        return following if can_copy else None

    def _best(
        self, prompt: Sequence[int], adapter: int | None, rows: Mapping[int, Held]
    ) -> _Match | None:
        # The last token of the prompt is computed in any case, because its logits are needed.
        reusable = prompt[:-1]
        matches = []
        for slot, held in rows.items():
            if held.adapter != adapter:
                continue
            count = common(reusable, held.tokens)
            if count >= LEAST_REUSED:
                matches.append(_Match(slot, count, count == len(held.tokens)))
        # A state after more tokens can't be turned back.
        usable = [match for match in matches if match.whole or not self._model.recurrent]
        return max(usable, key=lambda match: match.count, default=None)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both rows begin."""
    low, high = 0, min(len(first), len(second))
    a, b = list(first), list(second)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
