"""`evaluate --webtext-eval`: the loss of random windows of a corpus, as Megatron-LM measured it in 2019.

A window begins in a document that is drawn by its length, at a random place if the document is longer than the window.
Further documents, drawn in the same way, fill it. Window n has a generator of its own with the seed n, so that every
run measures the same windows. The tokens of the corpus are in memory, 4 bytes each.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.inference.evaluation.corpus import Entry, exponential
from megatron_lite.inference.evaluation.windows import ROWS, Window, grouped, log_prob_sum
from megatron_lite.inference.slots import LanguageModel

Tokens = NDArray[np.int32]


def sampled_perplexity(
    model: LanguageModel, entries: Iterable[Entry], eod: int, length: int, count: int
) -> dict[str, Any]:
    """Return loss and perplexity by token of `count` windows with `length` predicted tokens each.

    eod: the token behind each document. Raises CorruptCheckpoint for an empty corpus, NotFinite.
    """
    tokens, ends = _joined(entries, eod)
    total = 0.0
    windows = random_windows(tokens, ends, length, count)
    for group in grouped(windows, max(ROWS, 4 * model.slots)):
        total -= log_prob_sum(model, group)
    loss = total / (count * length)
    return {
        "loss": loss,
        "perplexity": exponential(loss),
        "windows": count,
        "predicted_tokens": count * length,
        "documents": len(ends),
        "tokens": len(tokens),
    }


def _joined(entries: Iterable[Entry], eod: int) -> tuple[Tokens, NDArray[np.int64]]:
    """(the tokens of all documents with their ends, the place behind each document)."""
    parts = [np.array([*entry.tokens, eod], np.int32) for entry in entries]
    if not parts:
        raise CorruptCheckpoint("--corpus: the files have no documents")
    lengths = [len(part) for part in parts]
    return np.concatenate(parts), np.cumsum(lengths)


def random_windows(
    tokens: Tokens, ends: NDArray[np.int64], length: int, count: int
) -> Iterator[Window]:
    """Yield `count` windows of length + 1 tokens. ends: the place behind each document."""
    for number in range(count):
        drawn = np.random.RandomState(number)
        row: list[int] = []
        while len(row) <= length:
            first, end = _document(drawn, ends)
            spare = end - first - (length + 1)
            if not row and spare > 0:
                first += drawn.randint(spare + 1)
            row += tokens[first:end].tolist()
        yield Window(tuple(row[: length + 1]), length)


def _document(drawn: np.random.RandomState, ends: NDArray[np.int64]) -> tuple[int, int]:
    """(first place, place behind the last) of a document. A document is as likely as it is long."""
    place = drawn.randint(ends[-1])
    number = int(np.searchsorted(ends, place, side="right"))
    first = int(ends[number - 1]) if number else 0
    return first, int(ends[number])
