"""The multimodal models whose encoders read the images of a run, and the ranks that need them. `plan` uses it without torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.families import has_text_only
from megaconv.model.layout import Chunk
from megatron_lite.settings.config import Settings

ENCODER_FLAG, TEACHER_FLAG = "--image-encoder", "--teacher-image-encoder"
"""The flags that name encoders."""


def multimodal_model(settings: Settings) -> Path | None:
    """Return the model that may read images: --image-encoder, or --load if it is multimodal. Raises UsageError."""
    return multimodal_directory(settings.data.image_encoder, settings.checkpointing.load)


def multimodal_directory(
    asked: str | None, load: str | None, flag: str = ENCODER_FLAG
) -> Path | None:
    """See multimodal_model. asked: the value of the flag that names an encoder."""
    if asked is not None:
        if not has_text_only(Path(asked)):
            raise UsageError(
                f"{flag} {asked}: is no multimodal model; expected a directory with its config.json and weights"
            )
        return Path(asked)
    return Path(load) if load is not None and has_text_only(Path(load)) else None


def deepest(config: Mapping[str, Any]) -> int:
    """Return the number of first layers to whose output the encoder adds. config: the multimodal model's config.json."""
    return len(config["vision_config"].get("deepstack_visual_indexes") or ())


def reads_images(chunks: Iterable[Chunk], layers: int, *, predicts: bool) -> bool:
    """Return whether a rank computes an embedding, or one of the first layers, to whose output the encoder adds.

    layers: number of these first layers. predicts: whether MTP layers are trained, which embed images on the last stage.
    """
    return any(
        chunk.is_first or (chunk.is_last and predicts) or chunk.first_layer < layers
        for chunk in chunks
    )
