"""The pieces of examples that fit into a sample: of plain texts, of examples that are truncated, and of pairs of answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.examples import Examples


@dataclass(frozen=True)
class Pieces:
    """The parts of examples that samples consist of."""

    examples: Examples
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    cut: int
    """Number of examples whose end was left out."""
    dropped: int
    """Number of examples with nothing left to learn."""

    @property
    def read_ends(self) -> NDArray[np.int64]:
        """The ends of what the model reads: the last token of a piece is a label alone."""
        return self.ends - 1

    def __len__(self) -> int:
        return len(self.starts)


def pieces_for(examples: Examples, seq_length: int) -> Pieces:
    """Return the pieces. A sample of seq_length tokens uses seq_length + 1 tokens of an example; the last is only a label."""
    found: list[tuple[int, int]] = []
    cut = dropped = 0
    for number, (first, last) in enumerate(pairwise(examples.bounds.tolist())):
        if examples.divisible[number]:
            found += [
                (start, min(start + seq_length + 1, last))
                for start in range(first, last - 1, seq_length)
            ]
            continue
        end = min(last, first + seq_length + 1)
        if examples.images is not None and end < last:
            end = examples.images.last_whole_before_label(first, end)
        if not examples.learned[first + 1 : end].any():
            dropped += 1
            continue
        cut += end < last
        found.append((first, end))
    bounds = np.array(found, np.int64).reshape(-1, 2)
    return Pieces(examples, bounds[:, 0], bounds[:, 1], cut, dropped)


@dataclass(frozen=True)
class PairPieces(Pieces):
    """Pairs of consecutive rows: the parts of the chosen and of the rejected answer that fit."""

    numbers: NDArray[np.int64]
    """[pairs]: the number of each pair among all pairs of the examples."""
    reads_last: bool = False
    """True if the model reads the last token of a piece too, because this token gets the score."""

    @property
    def read_ends(self) -> NDArray[np.int64]:
        """See Pieces."""
        return self.ends if self.reads_last else super().read_ends

    @property
    def good(self) -> NDArray[np.bool_] | None:
        """The ratings of these answers, [pairs]; None if answers are not rated."""
        good = self.examples.good
        return None if good is None else good[self.numbers]

    @property
    def margins(self) -> NDArray[np.float64] | None:
        """The margins of these pairs, [pairs]; None if no pair of the examples has one."""
        margins = self.examples.margins
        return None if margins is None else margins[self.numbers]

    def __len__(self) -> int:
        return len(self.starts) // 2


def pairs_for(examples: Examples, seq_length: int) -> PairPieces:
    """Return the pieces of pairs. A pair is dropped if either answer has nothing left to learn, or if both answers
    begin alike and only the equal beginnings are left."""
    starts, kept, rows = _fitting_rows(examples, seq_length)
    is_cut = np.asarray(rows.any(1))
    whole = _learn_something(examples, starts, kept)
    whole &= _differ(examples, starts, kept, is_cut)
    return _pair_pieces(examples, starts, kept, whole, is_cut)


def rated_for(examples: Examples, seq_length: int) -> PairPieces:
    """Return the pieces of rated answers, each with its question's other answer. It is dropped if nothing is left to
    learn of one of them."""
    starts, kept, rows = _fitting_rows(examples, seq_length)
    whole = _learn_something(examples, starts, kept)
    return _pair_pieces(examples, starts, kept, whole, rows[:, 0])


def _fitting_rows(
    examples: Examples, seq_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (starts, ends, whether it is truncated) of each row, [pairs, 2]. No image is cut."""
    starts = examples.bounds[:-1].reshape(-1, 2)
    ends = examples.bounds[1:].reshape(-1, 2)
    kept = np.minimum(ends, starts + seq_length + 1)
    rows = np.asarray(kept < ends)
    if examples.images is not None:
        kept = _shortened(starts, kept, rows, examples.images.last_whole_before_label)
    return starts, kept, rows


def scored_pairs_for(examples: Examples, length: int, padding: int | None) -> PairPieces:
    """Return the pieces of pairs whose last tokens get scores: the first `length` tokens of each answer.

    No image is cut. Tokens of padding before such an end are left out too. A pair is dropped if nothing is left of an
    answer, or the same of both.
    """
    starts = examples.bounds[:-1].reshape(-1, 2)
    ends = examples.bounds[1:].reshape(-1, 2)
    fitting = np.minimum(ends, starts + length)
    is_cut = fitting < ends
    if examples.images is not None:
        fitting = _shortened(starts, fitting, is_cut, examples.images.last_whole)
    kept = _shortened(starts, fitting, is_cut, partial(_end_without, padding, examples))
    whole = np.asarray((kept > starts).all(1))
    whole &= _differ(examples, starts, kept, whole)
    pieces = _pair_pieces(examples, starts, kept, whole, np.asarray(is_cut.any(1)))
    return replace(pieces, reads_last=True)


def _shortened(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    rows: NDArray[np.bool_],
    end_of: Callable[[int, int], int],
) -> NDArray[np.int64]:
    """The ends [pairs, 2], in these rows moved by `end_of`, which returns the new end from start and end."""
    kept = ends.copy()
    for place in zip(*np.nonzero(rows), strict=True):
        kept[place] = end_of(int(starts[place]), int(ends[place]))
    return kept


def _pair_pieces(
    examples: Examples,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    whole: NDArray[np.bool_],
    is_cut: NDArray[np.bool_],
) -> PairPieces:
    """starts, ends: [pairs, 2]. whole, is_cut: [pairs], True for pairs that stay, and for those that are truncated."""
    return PairPieces(
        examples,
        starts[whole].ravel(),
        ends[whole].ravel(),
        int(is_cut[whole].sum()),
        int((~whole).sum()),
        np.flatnonzero(whole),
    )


def _learn_something(
    examples: Examples, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """True for each pair whose two answers have a token to learn. starts, ends: [pairs, 2]."""
    # Number of learned tokens before each position.
    before = np.concatenate(([0], np.cumsum(examples.learned)))
    learned = before[ends] - before[starts + 1]
    return np.asarray((learned > 0).all(1))


def _differ(
    examples: Examples,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    compared: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """False for each of the compared pairs of which the same is left of both answers. starts, ends: [pairs, 2]."""
    differ = np.ones(len(starts), bool)
    for pair in np.flatnonzero(compared):
        chosen, rejected = map(slice, starts[pair], ends[pair])
        differ[pair] = not np.array_equal(examples.tokens[chosen], examples.tokens[rejected])
    return differ


def without_end(examples: Examples, token: int | None) -> Examples:
    """Return the examples without a token at their ends, however often it stands there."""
    kept = np.ones(len(examples.tokens), bool)
    for start, end in pairwise(examples.bounds.tolist()):
        kept[_end_without(token, examples, start, end) : end] = False
    before = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))
    return replace(
        examples,
        tokens=examples.tokens[kept],
        learned=examples.learned[kept],
        bounds=before[examples.bounds],
        images=None if examples.images is None else examples.images.without_tokens(kept),
    )


def _end_without(token: int | None, examples: Examples, start: int, end: int) -> int:
    """The end of a piece before a token that stands there, however often."""
    while end > start and examples.tokens[end - 1] == token:
        end -= 1
    return end
