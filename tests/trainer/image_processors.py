"""transformers' image processors for small models."""

from collections.abc import Mapping
from typing import Any

import pytest

PIXTRAL = {"llava_pixtral": 1, "mistral3": 2, "ministral3": 2, "lighton_ocr": 2}
"""Models with the encoder of Pixtral -> number of patches on a side that are merged."""
NEEDS_TORCHVISION = ("lfm2_vl",)

_SQUARE = {"height": 16, "width": 16}
_PARTS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_PATCHES = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_NINE = [[rows * 16, columns * 16] for rows in (1, 2, 3) for columns in (1, 2, 3)]
_TILES = {"size": _SQUARE, "max_patches": 4}
PROCESSORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llava": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": _SQUARE}),
    "llava_next": (
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 16},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionImageProcessorPil",
        {"size": _SQUARE, "image_grid_pinpoints": _NINE},
    ),
    "minicpmv4_6": (
        "MiniCPMV4_6ImageProcessorPil",
        {"scale_resolution": 16, "patch_size": 2, "max_slice_nums": 4},
    ),
    "ovis2": ("Ovis2ImageProcessorPil", {**_TILES, "crop_to_patches": True}),
    "internvl": ("GotOcr2ImageProcessorPil", _TILES),
    "qianfan_ocr": ("GotOcr2ImageProcessorPil", _TILES),
    "aya_vision": ("GotOcr2ImageProcessorPil", _TILES),
    # Its own image processor needs torchvision, and chooses other tiles.
    "cohere2_vision": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 8, "width": 8}, "max_patches": 4, "crop_to_patches": True},
    ),
    "smolvlm": ("SmolVLMImageProcessorPil", _PARTS),
    "idefics3": ("Idefics3ImageProcessorPil", _PARTS),
    "lfm2_vl": (
        "Lfm2VlImageProcessor",
        {
            "encoder_patch_size": 4,
            "tile_size": 16,
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "max_tiles": 2,
        },
    ),
    "deepseek_vl": ("DeepseekVLImageProcessorPil", {"size": _SQUARE}),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": _SQUARE}),
    "gemma4": ("Gemma4ImageProcessorPil", _PATCHES),
    "gemma4_small": ("Gemma4ImageProcessorPil", _PATCHES),
    # Its own image processor needs torchvision. It makes patches as this one does without pooling.
    "gemma4_unified": (
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 1, "max_soft_tokens": 70},
    ),
    "paddleocr_vl": (
        "PaddleOCRVLImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
    ),
    **{
        kind: ("PixtralImageProcessorPil", {"size": {"longest_edge": 20 * merge}})
        for kind, merge in PIXTRAL.items()
    },
}
"""Models -> the class of their image processor, and its settings. All others have Qwen2-VL's."""
_QWEN = (
    "Qwen2VLImageProcessorPil",
    {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    },
)


def image_processor(kind: str, transformers: Any) -> Any:
    """The image processor of a small model."""
    name, settings = PROCESSORS.get(kind, _QWEN)
    if kind in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision", reason=f"transformers' {name} needs torchvision")
    return getattr(transformers, name)(**settings)
