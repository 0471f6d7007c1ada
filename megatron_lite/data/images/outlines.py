"""The output of transformers' image processor for an image of which only the size is known."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

GRID = "image_grid_thw"
"""The patches of an image before neighbours are merged: frames, rows and columns."""


class Outline(Mapping[str, Any]):
    """The output for a blank image. It is computed when it is needed, and a grid without pixels."""

    def __init__(
        self, processor: Callable[[], Any], size: tuple[int, int], blank: Callable[[], Any]
    ) -> None:
        """processor: returns transformers' image processor. size: (width, height). blank: returns its output for a blank image."""
        self._processor, self._size, self._blank = processor, size, blank

    def __getitem__(self, name: str) -> Any:
        if name == GRID and self._grid is not None:
            return [self._grid]
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @cached_property
    def _grid(self) -> tuple[int, int, int] | None:
        return grid_of(self._processor(), *self._size)

    @cached_property
    def _whole(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._blank()
        return found


def grid_of(processor: Any, width: int, height: int) -> tuple[int, int, int] | None:
    """Return (frames, rows, columns) of an image; None if the processor doesn't scale images as Qwen2-VL's does.

    A large image takes seconds to process, its size alone microseconds. Raises ValueError for a size that the processor
    refuses. Source: `resize` and `get_number_of_image_patches` of the processors in transformers 5.24.
    """
    resize = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
    count = getattr(processor, "get_number_of_image_patches", None)
    if resize is None or count is None or not processor.do_resize:
        return None
    frames, patch = processor.temporal_patch_size, processor.patch_size
    known = {
        "num_frames": frames,
        "temporal_factor": frames,
        "height": height,
        "width": width,
        "factor": patch * processor.merge_size,
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    names = inspect.signature(resize).parameters
    if not names.keys() <= known.keys():
        return None
    fitted_height, fitted_width = resize(**{name: known[name] for name in names})
    rows, columns = fitted_height // patch, fitted_width // patch
    return (1, rows, columns) if rows * columns == count(height, width) else None
