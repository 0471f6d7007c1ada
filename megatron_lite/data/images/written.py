"""The text of an image in a chat, as transformers' processors of text and images write it.

| model | text |
|---|---|
| Qwen, GLM, LLaVA 1.5 | the token of images, as often as the encoder gives vectors |
| LLaVA-NeXT | the same, also for a vector at the end of each row of tiles |
| LLaVA-OneVision | as LLaVA-NeXT; one of several images: the whole image in small alone |
| InternVL, Qianfan-OCR | `<img>`, the same for all tiles of the image, `</img>` |
| Gemma 3 | an empty line, `<start_of_image>`, the same, `<end_of_image>`, an empty line |
| Gemma 4 | `<|image>`, the same, `<image|>` |
| SmolVLM, Idefics3 | for each tile `<fake_token_around_image>`, `<row_1_col_1>` and the same; at last `<global-img>` with the whole image |
| LFM2-VL | `<|image_start|>`, for each tile `<|img_row_1_col_1|>` and the same, `<|img_thumbnail|>` with the whole image, `<|image_end|>` |
| LightOnOCR | the same |
| MiniCPM-V | `<image_id>0</image_id>`, `<image>`, the whole image, `</image>`; for each slice `<slice>`, the same, `</slice>` |
| Ovis2 | the token of images, also for the vectors around and between the tiles |
| Aya Vision | `<|START_OF_IMG|>`, for each tile `TILE_1` and the same, `TILE_GLOBAL` with the whole image, `<|END_OF_IMG|>` |
| Command A Vision | `<|START_OF_IMG|>`, the same for each tile and for the whole image, each with `<|IMG_LINE_BREAK|>`, `<|END_OF_IMG|>` |
| Mistral 3, Pixtral | the same with `[IMG_BREAK]` after each row, and `[IMG_END]` after the last |
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
"""A multimodal model's config.json."""
Processed = Mapping[str, Any]
"""The output of transformers' image processor for one image, as arrays."""


class Grid(NamedTuple):
    """The tokens of an image for which its encoder gives vectors, in rows and columns.

    An image without rows has (1, 1, tokens).
    """

    frames: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns


class Words(NamedTuple):
    """The texts of tokens that config.json names."""

    image: str
    """Stands for each part of an image."""
    start: str
    """Before an image; empty for a config.json without it, as the next one."""
    end: str


NUMBER = "\1number\1"
"""Stands in a text for the number of the image in its chat."""


class Written(NamedTuple):
    """An image in a text."""

    text: str
    """Replaces what the chat template writes. See `numbered`."""
    grid: Grid


def numbered(images: Iterable[Written]) -> list[str]:
    """Return the texts of the images of a chat, with their numbers where texts state them."""
    return [image.text.replace(NUMBER, str(number)) for number, image in enumerate(images)]


def _run(grid: Grid, word: str) -> Written:
    """Return an image that is nothing but its tokens. word: the text of the token."""
    return Written(word * grid.tokens, grid)


def _counted(text: str, words: Words) -> Written:
    """Return an image whose tokens stand among others."""
    return Written(text, Grid(1, 1, text.count(words.image)))


def write_merged(config: Config, processed: Processed, words: Words) -> Written:
    """Return the patches that are left after neighbours were merged."""
    merge = config["vision_config"].get("spatial_merge_size", 2)
    frames, rows, columns = (int(size) for size in processed["image_grid_thw"][0])
    return _run(Grid(frames, rows // merge, columns // merge), words.image)


def write_square(config: Config, processed: Processed, words: Words) -> Written:
    """Return the patches of an image of the one size that the encoder takes. `full` adds the token of the class."""
    side = _patches_of_side(config)
    is_full = config.get("vision_feature_select_strategy", "default") == "full"
    return _run(Grid(1, 1, side * side + is_full), words.image)


def write_next(config: Config, processed: Processed, words: Words) -> Written:
    """Return the whole image in small, and its tiles without their padding. A row of patches ends with one more vector.

    Source: LlavaNextProcessor of transformers 5.24.
    """
    rows, columns = _patches_of_tiles(config, processed)
    whole = write_square(config, processed, words).grid.tokens
    return _run(Grid(1, 1, whole + rows * (columns + 1)), words.image)


def write_anyres(config: Config, processed: Processed, words: Words) -> Written:
    """Return the same for LLaVA-OneVision, which scales the patches of the tiles down if there are too many.

    Source: LlavaOnevisionProcessor of transformers 5.24.
    """
    rows, columns = _patches_of_tiles(config, processed)
    side = _patches_of_side(config)
    most_tiles = int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    ratio = math.sqrt(rows * columns / (most_tiles * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return _run(Grid(1, 1, side**2 + rows * (columns + 1)), words.image)


def write_small(config: Config, processed: Processed, words: Words) -> Written:
    """Return the whole image in small, with one more vector at its end."""
    return _run(Grid(1, 1, _patches_of_side(config) ** 2 + 1), words.image)


def _patches_of_side(config: Config) -> int:
    """Return the number of patches on a side of the square that the encoder takes."""
    side: int = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    return side


def _patches_of_tiles(config: Config, processed: Processed) -> tuple[int, int]:
    """Return the (rows, columns) of patches of all tiles of an image, without their padding."""
    from transformers.image_processing_utils import select_best_resolution

    of_tile, size = _patches_of_side(config), config["vision_config"]["image_size"]
    height, width = (int(length) for length in processed["image_sizes"][0])
    fitted = select_best_resolution((height, width), config["image_grid_pinpoints"])
    rows, columns = (length // size * of_tile for length in fitted)
    if width / height > columns / rows:
        return _without_padding(rows, height * (columns / width)), columns
    return rows, _without_padding(columns, width * (rows / height))


def _without_padding(patches: int, image: float) -> int:
    """Return the number of patches without those that are padding, of which both sides have as many.

    image: the number of patches of the image, with a fraction.
    """
    of_side = (patches - int(round(image, 7))) // 2
    return patches - 2 * of_side


def write_tiles(config: Config, processed: Processed, words: Words) -> Written:
    """Return the tiles of an image, the last of which is the whole image in small."""
    side = _patches_across(config["vision_config"], image_size=448, patch_size=14)
    of_tile = int(side * config.get("downsample_ratio", 0.5)) ** 2
    tokens = of_tile * int(processed["num_patches"][0])
    return _counted(f"<img>{words.image * tokens}</img>", words)


def write_titled(config: Config, processed: Processed, words: Words) -> Written:
    """Return the tiles of an image with their numbers, and the whole image in small as the last tile."""
    tile, tiles = _merged_tile(config, words), int(processed["num_patches"][0])
    text = "".join(f"TILE_{number}{tile}" for number in range(1, tiles))
    return _counted(f"<|START_OF_IMG|>{text}TILE_GLOBAL{tile}<|END_OF_IMG|>", words)


def write_lines(config: Config, processed: Processed, words: Words) -> Written:
    """Return the tiles of an image with a token at the end of each. The last tile is the whole image in small."""
    tile, tiles = _merged_tile(config, words), int(processed["num_patches"][0])
    lines = f"{tile}<|IMG_LINE_BREAK|>" * tiles
    return _counted(f"<|START_OF_IMG|>{lines}<|END_OF_IMG|>", words)


def _merged_tile(config: Config, words: Words) -> str:
    """Return the tokens of a tile that SigLIP reads, of which squares of patches are merged."""
    side = _patches_across(config["vision_config"], image_size=224, patch_size=16)
    tokens: int = (side // config.get("downsample_factor", 2)) ** 2
    return words.image * tokens


def write_bordered(config: Config, processed: Processed, words: Words) -> Written:
    """Return the whole image in small and its tiles, with the vectors that the encoder puts around and between them.

    transformers' processor writes tokens of their own for the latter, whose embeddings the model replaces too.
    """
    rows, columns = (int(count) for count in processed["grids"][0])
    vision, tiles = config["vision_config"], rows * columns
    side = _patches_across(vision, image_size=224, patch_size=14) // vision.get("hidden_stride", 1)
    with_whole = tiles + 1 if tiles > 1 else 1
    around, between = 3, tiles - 1
    return _run(Grid(1, 1, with_whole * side**2 + around + between), words.image)


def write_rows(config: Config, processed: Processed, words: Words) -> Written:
    """Return the patches of an image with a token at the end of each row."""
    height, width = (int(size) for size in processed["image_sizes"][0])
    side = pixtral_patch(config)
    rows = [words.image * (width // side)] * (height // side)
    return _counted("[IMG_BREAK]".join(rows) + "[IMG_END]", words)


def write_apart(config: Config, processed: Processed, words: Words) -> Written:
    """Return an image with the same number of tokens as all others, between empty lines."""
    tokens = words.image * config.get("mm_tokens_per_image", 256)
    return _counted(f"\n\n{words.start}{tokens}{words.end}\n\n", words)


def write_patches(config: Config, processed: Processed, words: Words) -> Written:
    """Return the patches of an image of any size."""
    height, width = (int(size) for size in processed["image_sizes"][0])
    side = pixtral_patch(config)
    return _run(Grid(1, height // side, width // side), words.image)


def write_numbered(config: Config, processed: Processed, words: Words) -> Written:
    """Return the tiles of an image with their rows and columns, and the whole image in small as the last tile."""
    vision, around = config["vision_config"], "<fake_token_around_image>"
    side = vision["image_size"] // vision["patch_size"]
    tile = words.image * int(side**2 / config.get("scale_factor", 2) ** 2)
    rows, columns = (int(processed[name][0][0]) for name in ("rows", "cols"))
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"{around}<row_{row}_col_{column}>{tile}"
        text += "\n"
    if text:
        text += "\n"
    return _counted(f"{text}{around}<global-img>{tile}{around}", words)


def write_shaped(config: Config, processed: Processed, words: Words) -> Written:
    """Return the tiles of an image with their rows and columns, and the whole image in small, each of its own shape."""
    factor = config.get("downsample_factor", 2)
    rows, columns = (int(processed[name][0]) for name in ("image_rows", "image_cols"))
    text = ""
    for number, shape in enumerate(processed["spatial_shapes"]):
        height, width = (int(length) // factor for length in shape)
        row, column = divmod(number, columns)
        if row < rows and rows * columns > 1:
            text += f"<|img_row_{row + 1}_col_{column + 1}|>"
        elif number:
            text += "<|img_thumbnail|>"
        text += words.image * (height * width)
    return _counted(f"<|image_start|>{text}<|image_end|>", words)


def write_sliced(config: Config, processed: Processed, words: Words) -> Written:
    """Return the number of an image in its chat, the whole image in small, and its slices, row by row."""
    patches_of_token = 4 if config.get("downsample_mode") == "4x" else 16
    parts = []
    for height, width in processed["target_sizes"]:
        tokens = int(height) * int(width) // patches_of_token
        parts.append(words.image * tokens)
    whole, *slices = parts
    columns = int(processed["grids"][0][1])
    text = f"<image_id>{NUMBER}</image_id><image>{whole}</image>"
    for number, part in enumerate(slices):
        if number and number % columns == 0:
            text += "\n"
        text += f"<slice>{part}</slice>"
    return _counted(text, words)


def write_soft(config: Config, processed: Processed, words: Words) -> Written:
    """Return an image with the number of tokens that the image processor gives, between two others."""
    tokens = words.image * int(processed["num_soft_tokens_per_image"][0])
    return _counted(f"{words.start}{tokens}{words.end}", words)


def pixtral_patch(config: Config) -> int:
    """Return the side of a square that becomes a token, in pixels: a patch of the encoder, or several that are merged."""
    merge: int = config.get("spatial_merge_size", 1)
    patch: int = config["vision_config"].get("patch_size", 16)
    return patch * merge


def _patches_across(vision: Config, image_size: int, patch_size: int) -> int:
    """Return the number of patches on a side of a tile. image_size, patch_size: for a config.json without them."""
    pixels = _first(vision.get("image_size", image_size))
    return pixels // _first(vision.get("patch_size", patch_size))


def _first(size: Any) -> int:
    """Return a side of a square, which may be given by both sides."""
    return int(size[0] if isinstance(size, list) else size)
