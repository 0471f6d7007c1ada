"""Which tokens of a sample are hidden: words, or runs of several, in a random order until there are enough.

Every draw is made in the order of megatron-core's MaskedWordPieceDataset, so that the same seed hides the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GEOMETRIC = 0.2
"""Of the distribution of a run's length, SpanBERT's."""


@dataclass(frozen=True)
class Masking:
    """Names are those of Megatron's configuration."""

    probability: float = 0.15
    """Part of a sample's tokens that is hidden."""
    max_ngram: int = 3
    """Words of a run at most."""
    do_full_word: bool = True
    """Hide all pieces of a word together."""
    use_longer_ngrams: bool = False
    """Long runs are likelier than short ones."""
    use_geometric_distribution: bool = False


class Span(NamedTuple):
    places: list[int]
    tokens: list[int]
    """That were there."""


class Masked(NamedTuple):
    tokens: list[int]
    spans: list[Span]
    """In their order."""


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
    """longest: tokens that the sample might have had. continues: by token, whether it goes on with the word before it (##).
    never: tokens that are not hidden. draw: what is put in a token's place; None: itself.
    """
    words = list(_words(tokens, masking, continues, never))
    most = min(masking.probability * longest, max(1, round(len(tokens) * masking.probability)))
    hidden = list(tokens)
    spans: list[Span] = []
    taken: set[int] = set()
    order = list(range(len(words)))
    random.shuffle(order)
    for first in order:
        if most - len(taken) < 1:  # nothing fits any more, and what would be drawn for nothing nobody draws after
            break
        places = _fitting(words[first : first + masking.max_ngram], _length(masking, random), most - len(taken))
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
    """Places of each word's pieces, or of each piece alone."""
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
    """Words of a run, drawn; there may be fewer from its first one on."""
    if masking.use_geometric_distribution:
        return min(int(random.geometric(GEOMETRIC)), masking.max_ngram)
    # random.choice(lengths, p=...) of numpy, without its checks.
    bounds = _bounds(masking.max_ngram, longer=masking.use_longer_ngrams)
    return 1 + int(bounds.searchsorted(random.random_sample(), side="right"))


@cache
def _bounds(most: int, *, longer: bool) -> NDArray[np.float64]:
    """Of a number between 0 and 1 that is drawn for a length: below the first one for 1, between it and the second for 2 ..."""
    weights = 1.0 / (np.arange(most, dtype=np.int64) + 1)
    weights = weights / weights.sum(keepdims=True)
    if longer:
        weights = weights[::-1]
    bounds: NDArray[np.float64] = (weights / weights.sum(keepdims=True)).cumsum()
    bounds /= bounds[-1]
    return bounds


def _fitting(words: Sequence[list[int]], length: int, room: float) -> list[int]:
    """Places of the longest run of so many words or fewer for which there is room; empty where there is none."""
    for count in range(length, 0, -1):
        places = [place for word in words[:count] for place in word]
        if len(places) <= room:
            return places
    return []
