"""A request of generation: a prompt, and how to continue it. See batching.py."""

from dataclasses import dataclass

from megaconv.errors import UsageError
from megatron_lite.inference.beams import BeamRules
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.grammar import Grammar
from megatron_lite.inference.sampling import PLAIN, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = PLAIN
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a row and belong to it."""
    log_probs: int | None = None
    """Number of likeliest tokens to return, besides the chosen token's log-probability; None: no log-probabilities."""
    beams: BeamRules | None = None
    """Rules of a beam search for the likeliest rows; `sampling` and `log_probs` are then ignored."""
    adapter: int | None = None
    """See slots.Feed."""
    grammar: Grammar | None = None
    """The form of the answer; a beam search ignores it."""
    pictures: tuple[Picture, ...] = ()
    """The images in the prompt, which stay known until the request has ended."""

    @property
    def rows(self) -> int:
        """Number of slots that the request needs."""
        return 1 if self.beams is None else self.beams.width


class TooLong(UsageError):
    """A prompt and its answer don't fit into a slot."""


def check(request: Request, length: int) -> None:
    """Raise UsageError for an impossible request, and TooLong for one that doesn't fit into a slot of `length` tokens."""
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens is {request.max_tokens}; it must be 1 or more")
    check_prompt(request.prompt, request.max_tokens, length)


def check_prompt(prompt: tuple[int, ...], max_tokens: int, length: int) -> None:
    """Raise UsageError for an empty prompt, and TooLong for one that doesn't fit with its answer into `length` tokens.

    max_tokens: tokens of the answer; 0 for a prompt that is only read.
    """
    if not prompt:
        raise UsageError("the prompt is empty, and there is no token to begin with")
    needed = len(prompt) + max_tokens
    if needed > length:
        raise TooLong(
            f"a prompt of {len(prompt)} tokens and {max_tokens} to generate make {needed}; "
            f"there is room for {length}"
        )
