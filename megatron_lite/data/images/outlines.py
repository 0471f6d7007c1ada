"""The output of transformers' image processor for an image of which only the size is known.

A large image takes seconds to process. The sizes in the output follow from the image's size in microseconds.
Source of the sizes: the image processors of transformers 5.24.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

Arguments = Mapping[str, Any]
"""Arguments that an image processor is called with, beside its own settings."""


class Outline(Mapping[str, Any]):
    """The output for a blank image. Each field is computed when it is needed, some of them without pixels."""

    def __init__(
        self,
        size: tuple[int, int],
        processor: Callable[[], Any],
        arguments: Arguments,
        blank: Callable[[], Mapping[str, Any]],
    ) -> None:
        """size: (width, height). processor: returns the image processor. blank: returns its output for a blank image."""
        self._size, self._processor, self._arguments, self._blank = (
            size,
            processor,
            arguments,
            blank,
        )

    def __getitem__(self, name: str) -> Any:
        found = None
        if name in WITHOUT_PIXELS:
            found = WITHOUT_PIXELS[name](self._processor(), *self._size, self._arguments)
        return self._whole[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @cached_property
    def _whole(self) -> Mapping[str, Any]:
        return self._blank()


def grid_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the patches of Qwen2-VL's and GLM's processors, [(frames, rows, columns)].

    Each of these functions returns None for a processor that works in another way, and raises ValueError for a size that
    the processor refuses.
    """
    resize = _function("smart_resize", processor)
    count = getattr(processor, "get_number_of_image_patches", None)
    if resize is None or count is None or not processor.do_resize:
        return None
    frames, patch = processor.temporal_patch_size, processor.patch_size
    fitted = _call(
        resize,
        num_frames=frames,
        temporal_factor=frames,
        height=height,
        width=width,
        factor=patch * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    if fitted is None:
        return None
    rows, columns = fitted[0] // patch, fitted[1] // patch
    return [(1, rows, columns)] if rows * columns == count(height, width) else None


def tiles_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the number of tiles of InternVL's processor, [tiles]."""
    if _function("get_optimal_tiled_canvas", processor) is None:
        return None
    return [processor.get_number_of_image_patches(height, width, dict(arguments))]


def grids_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the rows and columns of tiles of Ovis2's and MiniCPM-V's processors, [(rows, columns)]."""
    if hasattr(processor, "get_sliced_grid"):
        return [_grid_of_slices(processor, width, height) or (0, 0)]
    fit = _function("get_min_tile_covering_grid", processor)
    if fit is None or not processor.use_covering_area_grid:
        return None
    if not processor.crop_to_patches or processor.max_patches < 2:
        return [(1, 1)]
    columns, rows = fit((height, width), processor.size["height"], processor.max_patches)
    return [(rows, columns)]


def _grid_of_slices(processor: Any, width: int, height: int) -> Any:
    """Return the (rows, columns) of slices of MiniCPM-V's processor; None for an image that is not sliced."""
    if not processor.slice_mode:
        return None
    return processor.get_sliced_grid(
        (height, width), processor.max_slice_nums, processor.scale_resolution
    )


def sizes_of_slices(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the patches of the whole image and of its slices by MiniCPM-V's processor, [(rows, columns)]."""
    if not hasattr(processor, "get_sliced_grid") or not processor.do_resize:
        return None
    patch, grid = processor.patch_size, _grid_of_slices(processor, width, height)
    settings = (processor.scale_resolution, patch, processor.downsample_mode)
    whole = processor.find_best_resize((height, width), *settings, allow_upscale=grid is None)
    sizes = [whole]
    if grid is not None:
        rows, columns = grid
        sliced = processor.get_refine_size((height, width), grid, *settings, allow_upscale=True)
        sizes += [(sliced[0] // rows, sliced[1] // columns)] * (rows * columns)
    return [(rows // patch, columns // patch) for rows, columns in sizes]


def rows_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the rows of tiles of SmolVLM's and Idefics3's processors, [[rows]]."""
    return _rows_and_columns(processor, width, height, arguments)[0]


def columns_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the columns of tiles of SmolVLM's and Idefics3's processors, [[columns]]."""
    return _rows_and_columns(processor, width, height, arguments)[1]


def _rows_and_columns(processor: Any, width: int, height: int, arguments: Arguments) -> list[Any]:
    count = getattr(processor, "get_number_of_image_patches", None)
    if count is None or not hasattr(processor, "do_image_splitting"):
        return [None, None]
    _, rows, columns = count(height, width, dict(arguments))
    return [[[rows]], [[columns]]]


def soft_tokens_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the number of tokens of Gemma 4's processor, [tokens]."""
    fit = _function("get_aspect_ratio_preserving_size", processor)
    if fit is None or not processor.do_resize:
        return None
    patch, pooled = processor.patch_size, processor.pooling_kernel_size
    fitted = _call(
        fit,
        height=height,
        width=width,
        patch_size=patch,
        max_patches=processor.max_soft_tokens * pooled**2,
        pooling_kernel_size=pooled,
    )
    return None if fitted is None else [fitted[0] * fitted[1] // (patch * pooled) ** 2]


def size_of(processor: Any, width: int, height: int, arguments: Arguments) -> Any:
    """Return the size after scaling by Pixtral's processor, and before scaling by LLaVA-NeXT's, [(height, width)]."""
    if _function("select_best_resolution", processor) is not None:
        return [(height, width)]
    fit = _function("get_resize_output_image_size", processor)
    patch = arguments.get("patch_size")
    if fit is None or patch is None or not processor.do_resize or processor.do_center_crop:
        return None
    longest = processor.size.get("longest_edge")
    if longest is None:
        return None
    fitted = _call(
        fit,
        # The array has the shape of an image, and the memory of one number.
        input_image=np.broadcast_to(np.uint8(0), (3, height, width)),
        size=(longest, longest),
        patch_size=(patch, patch),
        input_data_format="channels_first",
    )
    # The processor refuses an image of which nothing is left.
    return None if fitted is None or 0 in fitted else [fitted]


WITHOUT_PIXELS: Mapping[str, Callable[[Any, int, int, Arguments], Any]] = {
    "image_grid_thw": grid_of,
    "num_patches": tiles_of,
    "grids": grids_of,
    "target_sizes": sizes_of_slices,
    "image_sizes": size_of,
    "rows": rows_of,
    "cols": columns_of,
    "num_soft_tokens_per_image": soft_tokens_of,
}
"""Fields of an output -> the functions that compute them from (processor, width, height, arguments)."""


def _function(name: str, processor: Any) -> Callable[..., Any] | None:
    """Return a function beside the class of a processor."""
    found: Callable[..., Any] | None = getattr(sys.modules[type(processor).__module__], name, None)
    return found


def _call(function: Callable[..., Any], **known: Any) -> Any:
    """Return the function's result; None if it has an unknown argument."""
    names = inspect.signature(function).parameters
    if not names.keys() <= known.keys():
        return None
    return function(**{name: known[name] for name in names})
