"""transformers' image processors for small models, and the text of an image as its processors of text and images write it."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest

PIXTRAL = {"llava_pixtral": 1, "mistral3": 2, "ministral3": 2, "lighton_ocr": 2}
"""Models with the encoder of Pixtral -> number of patches on a side that are merged."""

TILED = ("smolvlm", "idefics3")
GEMMA_4 = ("gemma4", "gemma4_small")
TEXTS_OF_GEMMA_4 = {
    "gemma4_unified": "Gemma4UnifiedProcessor",
    **dict.fromkeys(GEMMA_4, "Gemma4Processor"),
}
INTERNVL = {"internvl": "InternVLProcessor", "qianfan_ocr": "QianfanOCRProcessor"}
WITH_PROCESSOR: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"name": "Gemma3Processor", "fields": {"image_seq_length": 16}},
}
"""Models whose processor of text and images needs no torchvision: its class, and its fields."""


def image_processor(kind: str, transformers: Any) -> Any:
    """The image processor of a small model."""
    if kind == "llava":
        side = {"height": 16, "width": 16}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    if kind == "llava_next":
        side, tiles = {"height": 16, "width": 16}, [[16, 32], [32, 16], [32, 32]]
        return transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=side, image_grid_pinpoints=tiles
        )
    if kind == "minicpmv4_6":
        return transformers.MiniCPMV4_6ImageProcessorPil(
            scale_resolution=16, patch_size=2, max_slice_nums=4
        )
    if kind == "ovis2":
        side = {"height": 16, "width": 16}
        return transformers.Ovis2ImageProcessorPil(size=side, max_patches=4, crop_to_patches=True)
    if kind == "llava_onevision":
        tiles = [[rows * 16, columns * 16] for rows in (1, 2, 3) for columns in (1, 2, 3)]
        return transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 16, "width": 16}, image_grid_pinpoints=tiles
        )
    if kind in ("internvl", "qianfan_ocr", "aya_vision"):
        side = {"height": 16, "width": 16}
        return transformers.GotOcr2ImageProcessorPil(size=side, max_patches=4)
    if kind == "cohere2_vision":
        # Its own image processor needs torchvision, and chooses other tiles.
        side = {"height": 8, "width": 8}
        return transformers.GotOcr2ImageProcessorPil(size=side, max_patches=4, crop_to_patches=True)
    if kind in TILED:
        name = "SmolVLMImageProcessorPil" if kind == "smolvlm" else "Idefics3ImageProcessorPil"
        return getattr(transformers, name)(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        )
    if kind == "lfm2_vl":
        pytest.importorskip(
            "torchvision", reason="transformers' image processor of LFM2-VL needs torchvision"
        )
        sizes = {
            "encoder_patch_size": 4,
            "tile_size": 16,
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "max_tiles": 2,
        }
        return transformers.Lfm2VlImageProcessor(**sizes)
    if kind == "deepseek_vl":
        return transformers.DeepseekVLImageProcessorPil(size={"height": 16, "width": 16})
    if kind == "gemma3":
        side = {"height": 16, "width": 16}
        return transformers.Gemma3ImageProcessorPil(size=side)
    if kind in GEMMA_4:
        return transformers.Gemma4ImageProcessorPil(
            patch_size=2, pooling_kernel_size=2, max_soft_tokens=70
        )
    if kind == "gemma4_unified":
        # Its own image processor needs torchvision. It makes patches as this one does without pooling.
        return transformers.Gemma4ImageProcessorPil(
            patch_size=4, pooling_kernel_size=1, max_soft_tokens=70
        )
    if kind in PIXTRAL:
        return transformers.PixtralImageProcessorPil(size={"longest_edge": 20 * PIXTRAL[kind]})
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
    if kind == "lfm2_vl":
        found = transformers.Lfm2VlProcessor.images_kwargs
    if kind in TILED:
        found = transformers.Idefics3Processor.images_kwargs
    if kind in INTERNVL:
        found = getattr(transformers, INTERNVL[kind]).images_kwargs
    if kind == "aya_vision":
        found = transformers.AyaVisionProcessor.images_kwargs
    if kind == "gemma3":
        found = transformers.Gemma3Processor.images_kwargs
    if kind in PIXTRAL:
        found = {"patch_size": 4 * PIXTRAL[kind]}
    return found


def processed_by(kind: str, processor: Any, images: Sequence[Any], transformers: Any) -> Any:
    """The image processor's output for the images of a chat, as a processor of text and images calls it."""
    given = arguments_of(kind, transformers)
    # LLaVA-OneVision looks at the number of images of a chat, which apply_chat_template gives in a list.
    of_chats = [images] if kind == "llava_onevision" else images
    return dict(processor(images=of_chats, return_tensors="pt", **given))


def texts_of(
    kind: str, transformers: Any, processed: Mapping[str, Any], word: str
) -> Sequence[str]:
    """The texts of images. processed: of all of them. word: the text of the token of images."""
    if kind in INTERNVL:
        words = {"image_token": word, "start_image_token": "<img>", "end_image_token": "</img>"}
        made = getattr(transformers, INTERNVL[kind])
        processor = _without_parts(made, image_seq_length=4, **words)
        return _written(processor, processed, len(processed["num_patches"]))
    if kind == "lighton_ocr":
        fields = {"image_token": word, "effective_patch_size": 8}
        processor = _without_parts(transformers.LightOnOcrProcessor, **fields)
        return _written(processor, processed, len(processed["image_sizes"]))
    if kind in PIXTRAL:
        words = {
            "image_token": word,
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        }
        sizes = {"patch_size": 4, "spatial_merge_size": PIXTRAL[kind]}
        processor = _without_parts(_processor_of_pixtral(), **words, **sizes)
        return _written(processor, processed, len(processed["image_sizes"]))
    if kind == "lfm2_vl":
        words = {
            "image_token": word, "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        }  # fmt: skip
        processor = _without_parts(
            transformers.Lfm2VlProcessor,
            image_processor=image_processor(kind, transformers),
            **words,
        )
        return [
            processor.replace_image_token(processed, number, use_image_special_tokens=True)
            for number in range(len(processed["image_rows"]))
        ]
    if kind in TILED:
        words = {"image_token": word, "fake_image_token": "<fake_token_around_image>"}
        name = "SmolVLMProcessor" if kind == "smolvlm" else "Idefics3Processor"
        tags = {"global_image_tag": "<global-img>", "global_image_token": "<global-img>"}
        processor = _without_parts(getattr(transformers, name), image_seq_len=4, **words, **tags)
        return _written(processor, processed, len(processed["rows"][0]))
    if kind == "gemma3":
        sequence = f"\n\n<start_of_image>{word * 16}<end_of_image>\n\n"
        processor = _without_parts(transformers.Gemma3Processor, full_image_sequence=sequence)
        return _written(processor, processed, len(processed["num_crops"]))
    if kind == "aya_vision":
        words = {
            "img_patch_token": word, "start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>",
            "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL",
        }  # fmt: skip
        processor = _without_parts(
            transformers.AyaVisionProcessor, img_size=16, patch_size=8, **words
        )
        return _written(processor, processed, len(processed["num_patches"]))
    if kind == "cohere2_vision":
        words = {
            "image_token": word, "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        }  # fmt: skip
        processor = _without_parts(transformers.Cohere2VisionProcessor, patch_size=2, **words)
        return _written(processor, processed, len(processed["num_patches"]))
    if kind in TEXTS_OF_GEMMA_4:
        words = {
            "image_token": word,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
        processor = _without_parts(getattr(transformers, TEXTS_OF_GEMMA_4[kind]), **words)
        return _written(processor, processed, len(processed["num_soft_tokens_per_image"]))
    if kind == "minicpmv4_6":
        return _texts_of_minicpm(transformers, processed, word)
    if kind == "ovis2":
        processor = _without_parts(transformers.Ovis2Processor, image_seq_length=4)
        texts = _written(processor, processed, len(processed["grids"]))
        return [text.replace("<IMG_ATOM>", word) for text in texts]
    if kind == "llava_onevision":
        fields = {
            "image_token": word, "num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2",
            "image_processor": image_processor(kind, transformers),
        }  # fmt: skip
        processor = _without_parts(transformers.LlavaOnevisionProcessor, **fields)
        return _written(processor, processed, len(processed["image_sizes"]))
    if kind == "llava_next":
        fields = {
            "image_token": word, "patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
            "image_processor": image_processor(kind, transformers),
        }  # fmt: skip
        processor = _without_parts(transformers.LlavaNextProcessor, **fields)
        return _written(processor, processed, len(processed["image_sizes"]))
    grids = processed.get("image_grid_thw")
    if grids is None:
        return [word * 16 for _ in processed["pixel_values"]]
    return [word * (int(grid.prod()) // 4) for grid in grids]


def processor(kind: str, tokenizer: Any, transformers: Any) -> Any:
    """transformers' processor of text and images."""
    images = image_processor(kind, transformers)
    made = WITH_PROCESSOR[kind]
    name, fields = made["name"], made["fields"]
    template = tokenizer.chat_template
    return getattr(transformers, name)(images, tokenizer, chat_template=template, **fields)


def _without_parts(processor: Any, **fields: Any) -> Any:
    """A processor of text and images without its parts, some of which need torchvision."""
    made = object.__new__(processor)
    vars(made).update(fields)
    return made


def _processor_of_pixtral() -> Any:
    """transformers' class. Its file imports another that needs torchvision, for a function that is not called here."""
    room = "transformers.models.pixtral"
    needs_torchvision = f"{room}.image_processing_pixtral"
    without = importlib.import_module(f"{room}.image_processing_pil_pixtral")
    with patch.dict(sys.modules, {needs_torchvision: without}):
        return importlib.import_module(f"{room}.processing_pixtral").PixtralProcessor


def _texts_of_minicpm(transformers: Any, processed: Mapping[str, Any], word: str) -> Sequence[str]:
    """The texts with the numbers of the images."""
    marks = {
        f"{part}_{end}_token": f"<{'/' * (end == 'end')}{part}>"
        for part in ("image", "slice", "image_id")
        for end in ("start", "end")
    }
    made = transformers.MiniCPMV4_6Processor
    processor = _without_parts(made, image_token=word, slice_mode=True, **marks)
    count = len(processed["grids"])
    texts = [
        processor.replace_image_token(processed, number, image_token_divisor=16)
        for number in range(count)
    ]
    numbered: Sequence[str] = processor._prepend_local_ids([word * count], texts, word)
    return numbered


def _written(processor: Any, processed: Mapping[str, Any], count: int) -> Sequence[str]:
    return [processor.replace_image_token(processed, number) for number in range(count)]
