"""Parses `--data-path` and `--split`: the corpora, their weights, and the part of each for training, validation and test.

Same rules as megatron-core (`datasets/utils.py`, `blended_megatron_dataset_config.py`).
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.blend import MOST_DATASETS, normalized

SPLITS = ("train", "valid", "test")

Part = tuple[float, float]
"""(start, end) of a part of a corpus, as fractions of its sequences."""


class Corpora(NamedTuple):
    """The corpora of a data flag and their weights."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """None: each corpus once, or as much of it as needed, in proportion to the sizes."""


def parse_corpora(words: Sequence[str], flag: str = "--data-path") -> Corpora:
    """Parse `a`, `a b c`, or alternating weights and prefixes: `0.3 a 0.7 b`. Raises UsageError."""
    if not words:
        raise UsageError(
            f"{flag} is empty; give the prefix of a dataset, its path without .bin or .idx"
        )
    names = tuple(word.strip() for word in words)
    weights = [number_of(word) for word in words[::2]]
    has_weights = len(words) % 2 == 0 and any(weight is not None for weight in weights)
    if not has_weights:
        return Corpora(names, None)

    prefixes = names[1::2]
    if len(prefixes) > MOST_DATASETS:
        raise UsageError(
            f"{flag}: {len(prefixes):,} corpora are more than the {MOST_DATASETS:,} that can be blended"
        )
    checked = []
    for weight, word, prefix in zip(weights, words[::2], prefixes, strict=True):
        if weight is None or not math.isfinite(weight) or weight <= 0:
            raise UsageError(
                f"{flag}: {word!r} before {prefix} is not a weight; write pairs such as 0.3 a 0.7 b"
            )
        checked.append(weight)
    return Corpora(prefixes, tuple(checked))


def number_of(word: str) -> float | None:
    """Return the number that a word is; None for another word."""
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> list[Part | None]:
    """Parse `949,50,1` to the parts for training, validation and test; None for an empty part. Raises UsageError."""
    shares = [float(number) for number in re.findall(r"\d+\.?\d*|\.\d+", text)]
    if not 1 <= len(shares) <= len(SPLITS) or not sum(shares) or re.sub(r"[\d., ]", "", text):
        raise UsageError(
            f"--split {text!r}: write the shares of training, validation and test, such as 949,50,1"
        )
    bounds = [0.0]
    for share in normalized(shares + [0.0] * (len(SPLITS) - len(shares))).tolist():
        bounds.append(bounds[-1] + share)
    return [(low, high) if high > low else None for low, high in pairwise(bounds)]


def part_of(part: Part, sequences: int) -> NDArray[np.int32]:
    """Return the numbers of the sequences in a part, int32."""
    low, high = (round(bound * float(sequences)) for bound in part)
    return np.arange(low, high, dtype=np.int32)
