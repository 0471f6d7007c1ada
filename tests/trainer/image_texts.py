"""The texts of images, as transformers' processors of text and images write them for small models."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.trainer.image_processors import PIXTRAL, image_processor

WORD = "<|image_pad|>"
"""The token of images."""
WITH_PROCESSOR: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"name": "Gemma3Processor", "fields": {"image_seq_length": 16}},
}
"""Models whose processor of text and images needs no torchvision: its class, and its fields."""


class Writer(NamedTuple):
    """A processor of text and images."""

    name: str
    fields: Mapping[str, Any] = MappingProxyType({})
    has_arguments: bool = False
    """True if it calls its image processor with arguments."""


_INTERNVL = {"image_seq_length": 4, "start_image_token": "<img>", "end_image_token": "</img>"}
_NUMBERED = {
    "image_seq_len": 4,
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
}
_GEMMA_4 = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
WRITERS: Mapping[str, Writer] = {
    "internvl": Writer("InternVLProcessor", _INTERNVL, has_arguments=True),
    "qianfan_ocr": Writer("QianfanOCRProcessor", _INTERNVL, has_arguments=True),
    "lighton_ocr": Writer("LightOnOcrProcessor", {"effective_patch_size": 8}),
    "lfm2_vl": Writer(
        "Lfm2VlProcessor",
        {
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        has_arguments=True,
    ),
    "smolvlm": Writer("SmolVLMProcessor", _NUMBERED, has_arguments=True),
    "idefics3": Writer("Idefics3Processor", _NUMBERED, has_arguments=True),
    "gemma3": Writer(
        "Gemma3Processor",
        {"full_image_sequence": f"\n\n<start_of_image>{WORD * 16}<end_of_image>\n\n"},
        has_arguments=True,
    ),
    "gemma4": Writer("Gemma4Processor", _GEMMA_4),
    "gemma4_small": Writer("Gemma4Processor", _GEMMA_4),
    "gemma4_unified": Writer("Gemma4UnifiedProcessor", _GEMMA_4),
    "aya_vision": Writer(
        "AyaVisionProcessor",
        {
            "img_size": 16,
            "patch_size": 8,
            "img_patch_token": WORD,
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "tile_token": "TILE",
            "tile_global_token": "TILE_GLOBAL",
        },
        has_arguments=True,
    ),
    "cohere2_vision": Writer(
        "Cohere2VisionProcessor",
        {
            "patch_size": 2,
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    ),
    "minicpmv4_6": Writer(
        "MiniCPMV4_6Processor",
        {
            "slice_mode": True,
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
    ),
    "ovis2": Writer("Ovis2Processor", {"image_seq_length": 4}),
    "llava_next": Writer(
        "LlavaNextProcessor",
        {
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "llava_onevision": Writer(
        "LlavaOnevisionProcessor",
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    **{
        kind: Writer(
            "PixtralProcessor",
            {
                "patch_size": 4,
                "spatial_merge_size": merge,
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
            },
        )
        for kind, merge in PIXTRAL.items()
        if kind != "lighton_ocr"
    },
}
"""Models whose images are more than tokens of images -> what writes them."""


class Shown(NamedTuple):
    """The images of a chat."""

    arguments: dict[str, Any]
    """The output of the image processor."""
    texts: Sequence[str]


def shown(kind: str, images: Sequence[Any], processor: Any, transformers: Any) -> Shown:
    """The images of a chat, as a processor of text and images gives them to a model. processor: of images."""
    # LLaVA-OneVision looks at the number of images of a chat, which apply_chat_template gives in a list.
    of_chats = [images] if kind == "llava_onevision" else images
    given = _arguments(kind, transformers)
    processed = dict(processor(images=of_chats, return_tensors="pt", **given))
    return Shown(processed, _texts(kind, transformers, processed, len(images)))


def _arguments(kind: str, transformers: Any) -> Mapping[str, Any]:
    """The arguments that a processor of text and images gives the image processor."""
    if kind in PIXTRAL:
        return {"patch_size": 4 * PIXTRAL[kind]}
    if kind not in WRITERS or not WRITERS[kind].has_arguments:
        return {}
    found: Mapping[str, Any] = getattr(transformers, WRITERS[kind].name).images_kwargs
    return found


def _texts(kind: str, transformers: Any, processed: Mapping[str, Any], count: int) -> Sequence[str]:
    """The texts of all images. processed: of all of them."""
    if kind not in WRITERS:
        grids = processed.get("image_grid_thw")
        return (
            [WORD * 16] * count if grids is None else [WORD * (int(g.prod()) // 4) for g in grids]
        )
    name, fields, _ = WRITERS[kind]
    made = _pixtral() if name == "PixtralProcessor" else getattr(transformers, name)
    # Without its parts, some of which need torchvision.
    writer = object.__new__(made)
    images = image_processor(kind, transformers)
    vars(writer).update(fields, image_token=WORD, image_processor=images)
    asked = {"use_image_special_tokens": True, "image_token_divisor": 16}  # LFM2-VL's and MiniCPM's
    texts = [writer.replace_image_token(processed, number, **asked) for number in range(count)]
    if kind == "minicpmv4_6":
        texts = writer._prepend_local_ids([WORD * count], texts, WORD)
    return [text.replace("<IMG_ATOM>", WORD) for text in texts]  # Ovis2's token of images


def _pixtral() -> Any:
    """transformers' class. Its file imports another that needs torchvision, for a function that is not called here."""
    room = "transformers.models.pixtral"
    needs_torchvision = f"{room}.image_processing_pixtral"
    without = importlib.import_module(f"{room}.image_processing_pil_pixtral")
    with patch.dict(sys.modules, {needs_torchvision: without}):
        return importlib.import_module(f"{room}.processing_pixtral").PixtralProcessor


def processor(kind: str, tokenizer: Any, transformers: Any) -> Any:
    """transformers' processor of text and images."""
    images = image_processor(kind, transformers)
    made = WITH_PROCESSOR[kind]
    name, fields = made["name"], made["fields"]
    template = tokenizer.chat_template
    return getattr(transformers, name)(images, tokenizer, chat_template=template, **fields)
