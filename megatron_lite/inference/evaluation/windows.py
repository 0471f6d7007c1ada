"""Windows of tokens whose log-probabilities are summed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.inference.slots import LanguageModel, require_finite

ROWS = 32
"""Number of windows that are scored together."""


@dataclass(frozen=True)
class Window:
    """A row of a task, without padding."""

    tokens: tuple[int, ...]
    counted: int
    """Number of last tokens that count."""


def stream_windows(parts: Iterable[Sequence[int]], length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a stream of tokens, with at most length + 1 tokens each.

    Each window starts `stride` tokens after the previous one. Every token except the first counts once. Only the
    current part and one window are in memory.
    """
    row: list[int] = []
    counted = 0  # targets at the start of the row that an earlier window counted
    for part in parts:
        row += part
        start = 0
        while len(row) - start > length:
            yield Window(tuple(row[start : start + length + 1]), length - counted)
            start += stride
            counted = length - stride
        del row[:start]
    left = len(row) - 1 - counted
    if left > 0:
        yield Window(tuple(row), left)


def grouped(windows: Iterable[Window], rows: int) -> Iterator[list[Window]]:
    """Yield the windows in lists of `rows`; the last list may be shorter."""
    group: list[Window] = []
    for window in windows:
        group.append(window)
        if len(group) == rows:
            yield group
            group = []
    if group:
        yield group


def log_prob_sum(model: LanguageModel, windows: Sequence[Window]) -> float:
    """Return the sum of the log-probabilities that count. Raises NotFinite."""
    total = 0.0
    scores = model.score([window.tokens for window in windows])
    for window, scored in zip(windows, scores, strict=True):
        log_probs = require_finite(scored).log_probs
        first = len(log_probs) - window.counted
        total += float(log_probs[first:].double().sum())
    return total
