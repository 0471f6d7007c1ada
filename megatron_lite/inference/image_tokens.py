"""Ids of the tokens of images. In a row of a running batch, each part of an image has an id of its own.

The vocabulary has one token for the parts of all images. With ids of their own, rows can be compared, divided and
continued as texts are: two rows are equal only if they show the same images.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FIRST = 1 << 40
"""The first id of an image's token. No vocabulary is as large."""
_PARTS = 1 << 20
"""More parts than an image has."""


def tokens_of(number: int, count: int) -> range:
    """Return the ids of an image. number: of the image. count: number of its parts."""
    assert count <= _PARTS
    first = FIRST + number * _PARTS
    return range(first, first + count)


def place_of(token: int) -> tuple[int, int]:
    """Return (number of the image, number of its part)."""
    return divmod(token - FIRST, _PARTS)


def images_of(tokens: Iterable[int]) -> list[int]:
    """Return the numbers of the images in a row, each once."""
    found = (place_of(token)[0] for token in tokens if token >= FIRST)
    return list(dict.fromkeys(found))


def without_images(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens of the vocabulary in a row."""
    return [token for token in tokens if token < FIRST]


def runs_of(tokens: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the tokens in runs: of texts, and of consecutive parts of one image."""
    ids = np.array(tokens, np.int64)
    is_image = ids >= FIRST
    follows = np.where(is_image[1:], ids[1:] == ids[:-1] + 1, ~is_image[:-1])
    return np.split(ids, np.flatnonzero(~follows) + 1)


def extent(tokens: Sequence[int], place: int) -> tuple[int, int]:
    """Return the places [first, last) of the image in which a row is cut; (place, place) for a cut elsewhere.

    place: of the token behind the cut.
    """
    number, part = place_of(tokens[place])
    if tokens[place] < FIRST or part == 0:
        return place, place
    last = place
    while last < len(tokens) and place_of(tokens[last])[0] == number:
        last += 1
    return place - part, last
