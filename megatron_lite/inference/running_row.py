"""The state of a request in a running batch (batching.py)."""

from dataclasses import dataclass

from megatron_lite.inference.beams import Search
from megatron_lite.inference.free_slots import Held
from megatron_lite.inference.grammar import Matcher
from megatron_lite.inference.image_tokens import extent
from megatron_lite.inference.requests import Request
from megatron_lite.inference.slots import Feed


@dataclass
class Row:
    """A request that waits, is being read, or generates."""

    number: int
    request: Request
    tokens: list[int]
    """The prompt and the generated tokens."""
    search: Search | None
    matcher: Matcher | None = None
    slots: tuple[int, ...] = ()
    done: int = 0
    """Number of tokens in its slots; while the prompt is being read, in the first slot."""
    drafted: tuple[int, ...] = ()
    """Guesses of the tokens that follow."""
    stale: bool = False
    """True if its slot has states after wrong guesses, so that the next turn computes the tokens of the last one again."""

    @property
    def waits_for(self) -> int:
        """Number of tokens of the prompt that still have to be read."""
        return len(self.tokens) - self.done

    @property
    def held(self) -> Held:
        """The tokens in its slot. The rows of a beam search are not reused, and states after wrong guesses neither."""
        if self.search is not None or self.stale:
            return Held()
        return Held(self.tokens[: self.done], self.request.adapter)

    def fitting(self, count: int) -> int:
        """Return the number of tokens of the prompt to read together: about `count`, without cutting an image that is whole."""
        end = self.done + count
        if end == len(self.tokens) or not any(each.is_whole for each in self.request.pictures):
            return count
        first, last = extent(self.tokens, end)
        return (first if first > self.done else last) - self.done

    def part(self, count: int) -> Feed:
        """Return a feed with the next tokens of the prompt."""
        tokens = tuple(self.tokens[self.done : self.done + count])
        return Feed(self.slots[0], self.done, tokens, self.request.adapter)

    def feeds(self) -> list[Feed]:
        """Return feeds with the last token of all of its rows, or with all tokens behind those in the slot, and the guesses."""
        if self.search is None:
            tokens = (*self.tokens[self.done :], *self.drafted)
            return [Feed(self.slots[0], self.done, tokens, self.request.adapter)]
        return [
            Feed(slot, self.done, (row[-1],), self.request.adapter)
            for slot, row in zip(self.slots, self.search.rows, strict=False)
        ]

    def followers(self, start: int, *, reads: bool) -> Feed:
        """Return a feed with the tokens behind those of the last turn, which began at position `start`.

        reads: True while the prompt is being read.
        """
        end = self.done + 1 if reads else len(self.tokens)
        tokens = tuple(self.tokens[start + 1 : end])
        return Feed(self.slots[0], start, tokens, self.request.adapter)

    @property
    def most_drafts(self) -> int:
        """Number of guesses that may all be accepted. The turn that checks them gives one more token."""
        generated = len(self.tokens) - len(self.request.prompt)
        return self.request.max_tokens - generated - 1
