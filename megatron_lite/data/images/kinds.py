"""The multimodal models whose images a run can train on: one line of a table for each kind of encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from megatron_lite.data.images.written import (
    Config,
    Processed,
    Words,
    Written,
    pixtral_patch,
    write_anyres,
    write_apart,
    write_bordered,
    write_lines,
    write_merged,
    write_next,
    write_numbered,
    write_patches,
    write_rows,
    write_shaped,
    write_sliced,
    write_small,
    write_soft,
    write_square,
    write_tiles,
    write_titled,
)

Write = Callable[[Config, Processed, Words], Written]


class Axes(NamedTuple):
    """The rotation of pairs of elements by three positions of a token: frame, row and column (mrope)."""

    sections: tuple[int, int, int]
    """Number of pairs that rotate by each of them, in a config.json that doesn't say it."""
    interleaved: bool
    """True if frame, row and column take turns; False if their pairs are one after the other."""


class Joint(Enum):
    """The layers in which the tokens of an image attend to each other in both directions."""

    NOWHERE = "nowhere"
    IN_WINDOWS = "in windows"
    """In layers with a sliding window."""
    EVERYWHERE = "everywhere"


@dataclass(frozen=True)
class ImageKind:
    """Multimodal models that read images in the same way."""

    model_types: tuple[str, ...]
    token_keys: tuple[str, ...]
    """The keys of config.json that may have the token that stands for a part of an image."""
    write: Write
    """Returns the text of an image from (config, the output of the image processor for it, the texts of tokens)."""
    axes: Axes | None = None
    """None if the tokens of images have positions as those of a text."""
    arguments: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Returns the arguments of the image processor that transformers' processor of text and images gives it."""
    placeholder: Callable[[Words], str] = attrgetter("image")
    """Returns the text of the token that the chat template writes for an image."""
    joint: Callable[[Config], Joint] = lambda config: Joint.NOWHERE
    """Returns the layers in which the tokens of an image attend to each other in both directions."""
    stand_in: Callable[[Config], int | None] = lambda config: None
    """Returns the token for which layers with embeddings of their own take each part of an image; None: its own token."""
    write_beside: Write | None = None
    """Returns the text of one of several images of a chat; None: as that of a single one, and its pixels are the same too."""
    encoder: str | None = None
    """The model_type of the encoder, if models of the same type have several encoders."""

    def words_of(self, config: Config, spell: Callable[[int], str]) -> Words:
        """Return the texts of tokens. spell: returns the text of a token. Raises CorruptCheckpoint."""
        start, end = (
            next((spell(config[key]) for key in keys if key in config), "")
            for keys in (("boi_token_id", "boi_token_index"), ("eoi_token_id", "eoi_token_index"))
        )
        return Words(spell(self.token_of(config)), start, end)

    def writer(self, several: bool) -> Write:
        """Return `write`, or `write_beside` for one of several images of a chat if this is another function."""
        return self.write_beside if several and self.write_beside is not None else self.write

    def token_of(self, config: Config) -> int:
        """Return the token that stands for each part of an image. Raises CorruptCheckpoint."""
        for key in self.token_keys:
            if key in config:
                return int(config[key])
        raise CorruptCheckpoint(
            f"config.json of a {config['model_type']} lacks {self.token_keys[0]}, the token that stands for images"
        )


def _in_tiles(config: Config) -> Mapping[str, Any]:
    return {"crop_to_patches": True}


def _of_patches(config: Config) -> Mapping[str, Any]:
    return {"patch_size": pixtral_patch(config)}


def _with_places(config: Config) -> Mapping[str, Any]:
    return {"return_row_col_info": True}


def _of_gemma(config: Config) -> Mapping[str, Any]:
    return {"do_pan_and_scan": False}


def _in_all_layers(config: Config) -> Joint:
    return Joint.EVERYWHERE


def _in_windows(config: Config) -> Joint:
    """The small models have causal attention alone. A config.json of the 12B may leave the key out."""
    default = "vision" if config["model_type"] == "gemma4_unified" else None
    is_large = text_of(config).get("use_bidirectional_attention", default) == "vision"
    return Joint.IN_WINDOWS if is_large else Joint.NOWHERE


def _image_word(words: Words) -> str:
    """Return the word that a chat template writes for an image, if it is none of the model's tokens."""
    return "<image>"


def _as_padding(config: Config) -> int:
    return int(text_of(config).get("pad_token_id") or 0)


KINDS: Sequence[ImageKind] = (
    ImageKind(
        ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"),
        ("image_token_id",),
        write_merged,
        Axes((16, 24, 24), interleaved=False),
    ),
    ImageKind(
        ("qwen3_vl", "qwen3_vl_moe"),
        ("image_token_id",),
        write_merged,
        Axes((24, 20, 20), interleaved=True),
    ),
    ImageKind(
        ("qwen3_5", "qwen3_5_moe"),
        ("image_token_id",),
        write_merged,
        Axes((11, 11, 10), interleaved=True),
    ),
    ImageKind(
        ("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        ("image_token_id",),
        write_merged,
        Axes((8, 12, 12), interleaved=False),
    ),
    ImageKind(("exaone4_5", "lfm3_vl"), ("image_token_id",), write_merged),
    ImageKind(
        ("llava",),
        ("image_token_id", "image_token_index"),
        write_rows,
        arguments=_of_patches,
        encoder="pixtral",
    ),
    ImageKind(("llava",), ("image_token_id", "image_token_index"), write_square),
    ImageKind(("llava_next",), ("image_token_id", "image_token_index"), write_next),
    ImageKind(
        ("llava_onevision",),
        ("image_token_id", "image_token_index"),
        write_anyres,
        write_beside=write_small,
    ),
    ImageKind(("internvl",), ("image_token_id",), write_tiles, arguments=_in_tiles),
    ImageKind(
        ("qianfan_ocr",),
        ("image_token_id",),
        write_tiles,
        arguments=_in_tiles,
        placeholder=_image_word,
    ),
    ImageKind(("ovis2",), ("image_token_id",), write_bordered, placeholder=_image_word),
    ImageKind(
        ("aya_vision",),
        ("image_token_id", "image_token_index"),
        write_titled,
        arguments=_in_tiles,
        placeholder=_image_word,
    ),
    ImageKind(("cohere2_vision",), ("image_token_id",), write_lines),
    ImageKind(
        ("mistral3",), ("image_token_id", "image_token_index"), write_rows, arguments=_of_patches
    ),
    ImageKind(("lighton_ocr",), ("image_token_id",), write_patches, arguments=_of_patches),
    ImageKind(("idefics3", "smolvlm"), ("image_token_id",), write_numbered, arguments=_with_places),
    ImageKind(("lfm2_vl",), ("image_token_id",), write_shaped, arguments=_with_places),
    ImageKind(("minicpmv4_6",), ("image_token_id",), write_sliced),
    ImageKind(("deepseek_vl",), ("image_token_id",), write_square),
    ImageKind(
        ("gemma3",),
        ("image_token_id", "image_token_index"),
        write_apart,
        arguments=_of_gemma,
        placeholder=attrgetter("start"),
        joint=_in_all_layers,
    ),
    ImageKind(
        ("gemma4",), ("image_token_id",), write_soft, joint=_in_windows, stand_in=_as_padding
    ),
    ImageKind(("gemma4_unified",), ("image_token_id",), write_soft, joint=_in_windows),
)


def text_of(config: Config) -> Config:
    """Return the language model's part of a config.json. Older files have it at the top."""
    text: Config = config.get("text_config", config)
    return text


def kind_of(config: Config) -> ImageKind | None:
    """Return the kind of a multimodal model; None if a run can't train on its images."""
    model_type = config.get("model_type")
    vision = config.get("vision_config")
    encoder = vision.get("model_type") if isinstance(vision, Mapping) else None
    return next(
        (
            kind
            for kind in KINDS
            if model_type in kind.model_types and kind.encoder in (None, encoder)
        ),
        None,
    )
