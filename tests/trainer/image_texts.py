"""transformers' image processors for small models, and the text of an image as its processors of text and images write it."""

from collections.abc import Mapping, Sequence
from typing import Any


def image_processor(kind: str, transformers: Any) -> Any:
    """The image processor of a small model."""
    if kind == "llava":
        side = {"height": 16, "width": 16}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    if kind == "internvl":
        side = {"height": 16, "width": 16}
        return transformers.GotOcr2ImageProcessorPil(size=side, max_patches=4)
    if kind == "paddleocr_vl":
        return transformers.PaddleOCRVLImageProcessorPil(
            patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096
        )
    limits = {"shortest_edge": 64, "longest_edge": 4096}
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size=limits
    )


def arguments_of(kind: str, transformers: Any) -> Mapping[str, Any]:
    """The arguments that a processor of text and images gives the image processor."""
    found: Mapping[str, Any] = {}
    if kind == "internvl":
        found = transformers.InternVLProcessor.images_kwargs
    return found


def texts_of(
    kind: str, transformers: Any, processed: Mapping[str, Any], word: str
) -> Sequence[str]:
    """The texts of images. processed: of all of them. word: the text of the token of images."""
    if kind == "internvl":
        words = {"image_token": word, "start_image_token": "<img>", "end_image_token": "</img>"}
        processor = _without_parts(transformers.InternVLProcessor, image_seq_length=4, **words)
        return _written(processor, processed, len(processed["num_patches"]))
    grids = processed.get("image_grid_thw")
    if grids is None:
        return [word * 16 for _ in processed["pixel_values"]]
    return [word * (int(grid.prod()) // 4) for grid in grids]


def _without_parts(processor: Any, **fields: Any) -> Any:
    """A processor of text and images without its parts, some of which need torchvision."""
    made = object.__new__(processor)
    vars(made).update(fields)
    return made


def _written(processor: Any, processed: Mapping[str, Any], count: int) -> Sequence[str]:
    return [processor.replace_image_token(processed, number) for number in range(count)]
