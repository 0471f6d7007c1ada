"""The special tokens of small multimodal models. Their other tokens are the 256 bytes."""

START = "<start_of_image>"
BORDERS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Ovis2 has them around and between the tiles of an image."""
SLICES = ("</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<img>", "</img>", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>",
    "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>",
    "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *BORDERS, *SLICES,
    "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>",
)  # fmt: skip


def token(name: str) -> int:
    """The id of a special token."""
    return 256 + SPECIAL.index(name)
