"""Selects the masked tokens of a sample: words, or spans of several words, in a random order until there are enough.

Draws have the order of megatron-core's MaskedWordPieceDataset, so that the same seed masks the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GEOMETRIC = 0.2
"""Parameter of the distribution of span lengths, from SpanBERT."""


@dataclass(frozen=True)
class Masking:
    """Options with the names of Megatron's configuration."""

    probability: float = 0.15
    """Fraction of a sample's tokens that are masked."""
    max_ngram: int = 3
    """Largest number of words in a span."""
    do_full_word: bool = True
    """Mask all pieces of a word together."""
    use_longer_ngrams: bool = False
    """Make long spans likelier than short ones."""
    use_geometric_distribution: bool = False


class Span(NamedTuple):
    """The places of one masked span."""

    places: list[int]
    tokens: list[int]
    """The tokens before masking."""


class Masked(NamedTuple):
    """A masked sample."""

    tokens: list[int]
    spans: list[Span]
    """In the order of their places."""


def mask(
    tokens: Sequence[int],
    longest: int,
    masking: Masking,
    random: np.random.RandomState,
    *,
    continues: NDArray[np.bool_],
    never: frozenset[int],
    draw: Callable[[np.random.RandomState], int | None],
) -> Masked:
    """Mask a sample. longest: the largest allowed number of tokens. continues: by token, whether it continues a word (##).

    never: tokens that are not masked. draw: returns the replacement of a token; None keeps the token.
    """
    words = list(_words(tokens, masking, continues, never))
    most = min(masking.probability * longest, max(1, round(len(tokens) * masking.probability)))
    hidden = list(tokens)
    spans: list[Span] = []
    taken: set[int] = set()
    order = list(range(len(words)))
    random.shuffle(order)
    for first in order:
        if most - len(taken) < 1:  # nothing fits any more, and later draws would be unused
            break
        places = _fitting(
            words[first : first + masking.max_ngram], _length(masking, random), most - len(taken)
        )
        if not places or not taken.isdisjoint(places):
            continue
        for place in places:
            taken.add(place)
            drawn = draw(random)
            hidden[place] = tokens[place] if drawn is None else drawn
        spans.append(Span(places, [tokens[place] for place in places]))
    return Masked(hidden, sorted(spans, key=lambda span: span.places[0]))


def _words(
    tokens: Sequence[int], masking: Masking, continues: NDArray[np.bool_], never: frozenset[int]
) -> Iterator[list[int]]:
    """Yield the places of each word's pieces, or of each single piece."""
    word: list[int] = []
    for place, token in enumerate(tokens):
        if token in never:
            continue
        if word and not (continues[token] and masking.do_full_word):
            yield word
            word = []
        word = [*word, place]
    if word:
        yield word


def _length(masking: Masking, random: np.random.RandomState) -> int:
    """Draw the number of words of a span. Fewer words may remain after its first word."""
    if masking.use_geometric_distribution:
        return min(int(random.geometric(GEOMETRIC)), masking.max_ngram)
    # The same as numpy's random.choice(lengths, p=...), without its checks.
    bounds = _bounds(masking.max_ngram, longer=masking.use_longer_ngrams)
    return 1 + int(bounds.searchsorted(random.random_sample(), side="right"))


@cache
def _bounds(most: int, *, longer: bool) -> NDArray[np.float64]:
    """Return bounds for a number drawn from [0, 1): length 1 below the first bound, 2 up to the second bound …"""
    weights = 1.0 / (np.arange(most, dtype=np.int64) + 1)
    weights = weights / weights.sum(keepdims=True)
    if longer:
        weights = weights[::-1]
    bounds: NDArray[np.float64] = (weights / weights.sum(keepdims=True)).cumsum()
    bounds /= bounds[-1]
    return bounds


def _fitting(words: Sequence[list[int]], length: int, room: float) -> list[int]:
    """Return the places of the longest span of at most `length` words that fits into `room`; [] if none fits."""
    for count in range(length, 0, -1):
        places = [place for word in words[:count] for place in word]
        if len(places) <= room:
            return places
    return []
