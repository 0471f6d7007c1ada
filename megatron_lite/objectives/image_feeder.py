"""Microbatches with images: the encoder of a multimodal model reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.batches import Batch
from megatron_lite.data.images.kinds import Joint
from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.images.positions import axes_of_pairs
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.moving import moved
from megatron_lite.models.pictures import Pictures, in_order, joint_of
from megatron_lite.models.trainable import rotated_width
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_encoder import ImageEncoder
from megatron_lite.objectives.image_models import (
    ENCODER_FLAG,
    TEACHER_FLAG,
    deepest,
    multimodal_model,
    reads_images,
)
from megatron_lite.objectives.training_data import Setup
from megatron_lite.settings.config import Settings

_MODELS = {ENCODER_FLAG: "the trained model", TEACHER_FLAG: "the teacher"}
"""The model that reads the vectors of each flag's encoder."""
PLACES = "places"
"""Name of an array, bool [..., sequence]: the tokens of images. Without it, all tokens of that kind are."""


def with_encoder(
    plain: Feeder,
    engine: Engine,
    reader: ImageReader | None,
    setup: Setup,
    flag: str = ENCODER_FLAG,
) -> "Feeder | ImageFeeder":
    """Return a feeder of the same microbatches with their images. reader: None if the data has no images.

    flag: names the encoder.

    Each rank that computes the first layers loads the encoder. Raises UsageError, TensorMismatch.
    """
    if reader is None:
        return plain
    require_same_width(reader, engine.config, flag)
    encoder = None
    if needs_encoder(engine, deepest(reader.config)):
        encoder = ImageEncoder(reader.directory, engine.grid.device, engine.dtype)
        blank, tokens = reader.trial()
        encoder.require_fitting(blank, tokens)
        setup.say(
            f"the encoder of {reader.directory} reads the images: {encoder.parameters:,} parameters on this rank, not trained"
        )
    reader.keeps_ready = encoder is not None
    axes = axes_tensor(reader, engine.config)
    return ImageFeeder(
        **vars(plain),
        reader=reader,
        encoder=encoder,
        axes_of_pairs=None if axes is None else axes.to(engine.grid.device),
    )


@dataclass(frozen=True)
class ImageFeeder(Feeder):
    """Makes microbatches with the images' features."""

    reader: ImageReader
    encoder: ImageEncoder | None
    """None on a rank whose layers need no images."""
    axes_of_pairs: Tensor | None
    """int64 [rotated / 2]: the axis (0 to 2) by which each pair of elements rotates; None: a token has one position."""

    def completed(self, made: Microbatch, arrays: Batch) -> Microbatch:
        """Return a microbatch with its images and with the positions of their tokens."""
        pairs = None
        if self.axes_of_pairs is not None:
            axes = arrays["axes"].flatten(0, -3)  # pairs of answers have an axis more
            pairs = moved(axes, self.device)[..., self.axes_of_pairs]
        made = replace(made, pair_positions=pairs)
        if not (arrays["images"] != NO_IMAGE).any():
            return made
        kind = self.reader.require_kind()
        places = self._places(made, arrays)
        joint, stand_in = kind.joint(self.reader.config), kind.stand_in(self.reader.config)
        return replace(
            made,
            tokens=made.tokens if stand_in is None else made.tokens.masked_fill(places, stand_in),
            pictures=self._pictures(places, arrays["images"]),
            joint=None if joint is Joint.NOWHERE else joint_of(places),
            joint_in_windows=joint is Joint.IN_WINDOWS,
        )

    def _places(self, made: Microbatch, arrays: Batch) -> Tensor:
        """Return bool [rows, sequence]: the tokens of images. A completion may have that token without an image."""
        if PLACES in arrays:
            return moved(arrays[PLACES], self.device)
        return made.tokens == self.reader.token

    def _pictures(self, places: Tensor, images: Tensor) -> Pictures | None:
        if self.encoder is None:
            return None
        numbers = [number for number in images.flatten().tolist() if number != NO_IMAGE]
        # The two answers of a pair have the same images, and so have both rows of a rated answer.
        counts = {number: self.reader.tokens(number) for number in numbers}
        inputs = [self.reader.inputs(number) for number in counts]
        features = self.encoder.encode(inputs, sum(counts.values()))
        rows = None
        if len(counts) < len(numbers):
            rows = moved(_rows_of(numbers, counts), self.device)[in_order(places)]
        return Pictures(places, *features, rows)


def _rows_of(numbers: Sequence[int], counts: Mapping[int, int]) -> Tensor:
    """Return int64 [tokens]: the rows of the vectors of images some of which come again.

    numbers: of all images in order. counts: the tokens of each different image by number, in the order of the vectors.
    """
    ends = accumulate(counts.values())
    rows = {
        number: torch.arange(end - counts[number], end)
        for number, end in zip(counts, ends, strict=True)
    }
    return torch.cat([rows[number] for number in numbers])


def image_reader(settings: Settings) -> ImageReader | None:
    """Return the reader of the images of a run; None if its model reads no images. Raises UsageError."""
    directory = multimodal_model(settings)
    return None if directory is None else ImageReader(directory)


def require_same_width(reader: ImageReader, config: ModelConfig, flag: str = ENCODER_FLAG) -> None:
    """Raise UsageError if the encoder's vectors don't fit the model. flag: names the encoder."""
    width = reader.width
    if width is not None and width != config.hidden:
        raise UsageError(
            f"{flag} {reader.directory}: its language model has a hidden size of {width}, and {_MODELS[flag]} one of "
            f"{config.hidden}; name the model that it came from"
        )


def needs_encoder(engine: Engine, layers: int) -> bool:
    """Return whether a rank needs an encoder that adds to the output of the first layers. layers: their number."""
    trains = engine.optimizer is not None and engine.criterion.trains_mtp
    predicts = engine.config.mtp_layers > 0 and trains
    return reads_images(engine.grid.chunks(), layers, predicts=predicts)


def axes_tensor(reader: ImageReader, config: ModelConfig) -> Tensor | None:
    """Return ImageFeeder.axes_of_pairs."""
    if reader.axes is None:
        return None
    return torch.from_numpy(axes_of_pairs(reader.axes, reader.config, rotated_width(config) // 2))
