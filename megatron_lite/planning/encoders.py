"""Encoders of images, which a run loads on the stages that read images (objectives/image_feeder.py)."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from megaconv.huggingface.weight_files import has_weights
from megaconv.model.beside import BESIDE
from megatron_lite.objectives.image_models import deepest


@dataclass(frozen=True)
class Encoder:
    """The encoder of a multimodal model, with its projector."""

    directory: Path
    parameters: int | None
    """None if it is unknown, because there is no file of weights."""
    layers: int
    """Number of the first layers to whose output it adds."""


def encoder_of(directory: Path) -> Encoder | None:
    """Return the encoder of a multimodal model; None for a model whose images a run can't train on.

    Reads headers, and no weights. Raises CheckpointError.
    """
    from megatron_lite.data.images.reader import ImageReader

    reader = ImageReader(directory)
    if reader.kind is None:
        return None
    return Encoder(directory, _parameters(directory), deepest(reader.config))


def _parameters(directory: Path) -> int | None:
    """Return the number of elements of the tensors outside the language model, which no config.json alone tells."""
    if not has_weights(directory):
        return None
    from megaconv.commands.inspection import inspect
    from megaconv.options import LoadOptions

    options = LoadOptions(optimizer=False)
    manifest = inspect(directory, options, None, check_source=False).header.manifest
    return sum(prod(info.shape) for key, info in manifest.items() if key.name.startswith(BESIDE))
