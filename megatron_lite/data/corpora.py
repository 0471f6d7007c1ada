"""What `--data-path` and `--split` say: which corpora, with which weights, and which part of each is for what.

As megatron-core reads them (`datasets/utils.py`, `blended_megatron_dataset_config.py`).
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
"""From where to where of a corpus, as fractions of its sequences."""


class Corpora(NamedTuple):
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """None: each corpus once, or as much of it as is needed, in proportion to their sizes."""


def parse_corpora(words: Sequence[str], flag: str = "--data-path") -> Corpora:
    """`a`, `a b c`, or weights and prefixes in turns: `0.3 a 0.7 b`. Raises UsageError."""
    weights = [_number(word) for word in words[::2]]
    if not words:
        raise UsageError(f"{flag} is empty; give the prefix of a dataset, its path without .bin or .idx")
    if len(words) % 2 or not any(weight is not None for weight in weights):
        return Corpora(tuple(word.strip() for word in words), None)
    prefixes = tuple(word.strip() for word in words[1::2])
    if len(prefixes) > MOST_DATASETS:
        raise UsageError(f"{flag}: {len(prefixes):,} corpora are more than the {MOST_DATASETS:,} that can be blended")
    for weight, word, prefix in zip(weights, words[::2], prefixes, strict=True):
        if weight is None or not (math.isfinite(weight) and weight > 0):
            raise UsageError(f"{flag}: {word!r} before {prefix} is not a weight; write pairs such as 0.3 a 0.7 b")
    return Corpora(prefixes, tuple(weight for weight in weights if weight is not None))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> list[Part | None]:
    """`949,50,1` -> the parts for training, validation and test; None for an empty one. Raises UsageError."""
    shares = [float(number) for number in re.findall(r"\d+\.?\d*|\.\d+", text)]
    if not 1 <= len(shares) <= len(SPLITS) or not sum(shares) or re.sub(r"[\d., ]", "", text):
        raise UsageError(f"--split {text!r}: write the shares of training, validation and test, such as 949,50,1")
    bounds = [0.0]
    for share in normalized(shares + [0.0] * (len(SPLITS) - len(shares))).tolist():
        bounds.append(bounds[-1] + share)
    return [(low, high) if high > low else None for low, high in pairwise(bounds)]


def part_of(part: Part, sequences: int) -> NDArray[np.int32]:
    """Numbers of the sequences that belong to a part, int32."""
    low, high = (round(bound * float(sequences)) for bound in part)
    return np.arange(low, high, dtype=np.int32)
