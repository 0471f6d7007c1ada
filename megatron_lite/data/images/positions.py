"""Positions of tokens where images have rows and columns (mrope)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.images.kinds import Axes, text_of
from megatron_lite.data.images.written import Config, Grid


def positions_of(tokens: int, images: Iterable[tuple[int, Grid]]) -> NDArray[np.int64]:
    """Return int64 [tokens, 3]: frame, row and column of each token of an example. In a text, all three count its tokens.

    images: (place of the first token, grid) of each image, in order. A text goes on after the larger side of an image.
    Source: get_rope_index of transformers 5.24.
    """
    found = np.zeros((tokens, 3), np.int64)
    place = position = 0
    for start, grid in images:
        text = start - place
        found[place:start] = position + np.arange(text)[:, None]
        position += text
        place = start + grid.tokens
        found[start:place] = position + patches(grid)
        position += max(grid.rows, grid.columns)
    found[place:] = position + np.arange(tokens - place)[:, None]
    return found


def patches(grid: Grid) -> NDArray[np.int64]:
    """Return int64 [tokens, 3]: frame, row and column of each patch, row by row."""
    axes: NDArray[np.int64] = np.indices(tuple(grid))
    return axes.reshape(3, -1).T


def axes_of_pairs(axes: Axes, config: Config, pairs: int) -> NDArray[np.int64]:
    """Return int64 [pairs]: the position by which each pair of elements rotates: 0 frame, 1 row, 2 column.

    config: the multimodal model's config.json, old or new. Raises CorruptCheckpoint.
    Source: recomposition_frequencies of transformers 5.24.
    """
    text = text_of(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or axes.sections
    _require_sections(sections, pairs)
    if not axes.interleaved:
        return np.repeat(np.arange(3), sections)
    found = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        found[axis : 3 * sections[axis] : 3] = axis
    return found


def _require_sections(sections: Any, pairs: int) -> None:
    """Raise CorruptCheckpoint if the sections don't divide the pairs among the three axes."""
    is_list = isinstance(sections, list | tuple) and len(sections) == 3
    are_counts = is_list and all(isinstance(each, int) and each >= 0 for each in sections)
    if not are_counts or sum(sections) != pairs:
        raise CorruptCheckpoint(
            f"config.json: mrope_section {sections!r:.60} should be three numbers whose sum is {pairs}, the pairs of elements that "
            "rotate"
        )
