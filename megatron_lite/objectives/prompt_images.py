"""The images of prompts whose completions are learned, on one rank: in sampling, and in the rows that are trained."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.images.positions import positions_of
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.image_tokens import FIRST, tokens_of
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.shown_images import ShownImages, traits_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import PLACES, ImageFeeder
from megatron_lite.objectives.prompts import Prompt


@dataclass(frozen=True)
class PromptImages:
    """The images of a run's prompts."""

    feeder: ImageFeeder
    pictures: Mapping[int, Picture]
    """By number."""

    @classmethod
    def of(cls, feeder: Feeder, prompts: Iterable[Prompt]) -> "PromptImages | None":
        """Return the images; None for a feeder without an encoder, because the prompts have no images."""
        if not isinstance(feeder, ImageFeeder):
            return None
        pictures = [picture for prompt in prompts for picture in prompt.pictures]
        return cls(feeder, {picture.number: picture for picture in pictures})

    def shown(self, model: EngineModel) -> ShownImages:
        """Return the images as a model of generation takes them."""
        traits = traits_of(self.feeder.reader, self.feeder.axes_of_pairs)
        return ShownImages(self, model.engine, model.length, traits)

    def picture(self, number: int) -> Picture:
        """Return an image with its vectors. Called on rank 0."""
        encoder, reader = self.feeder.encoder, self.feeder.reader
        assert encoder is not None, "rank 0 computes the first layers"
        vectors, further = encoder.encode([reader.inputs(number)], reader.tokens(number))
        return replace(self.pictures[number], vectors=torch.stack((vectors, *further)))

    def added(
        self, rows: Mapping[str, Tensor], prompts: Sequence[Prompt], generations: int
    ) -> dict[str, Tensor]:
        """Return the arrays of rows with those of their images. Each prompt has consecutive rows. generations: their number."""
        token = self.feeder.reader.token
        tokens, labels = rows["tokens"], rows["labels"]
        found = {
            **rows,
            "tokens": tokens.masked_fill(tokens >= FIRST, token),
            "labels": labels.masked_fill(labels >= FIRST, token),
            PLACES: tokens >= FIRST,
            "images": _numbers(prompts).repeat_interleave(generations, 0),
        }
        if self.feeder.axes_of_pairs is not None:
            axes = np.stack([_axes(prompt, tokens.shape[1]) for prompt in prompts])
            found["axes"] = torch.from_numpy(axes).repeat_interleave(generations, 0)
        return found


def _numbers(prompts: Sequence[Prompt]) -> Tensor:
    """Return int64 [prompts, most images, at least 1]: see ImageSample.images."""
    numbers = [[picture.number for picture in prompt.pictures] for prompt in prompts]
    most = max(1, *map(len, numbers))
    return torch.tensor([[*each, *[NO_IMAGE] * (most - len(each))] for each in numbers])


def _axes(prompt: Prompt, length: int) -> NDArray[np.int64]:
    """Return [length, 3]: see ImageSample.axes."""
    images = []
    for picture in prompt.pictures:
        (first,) = np.flatnonzero(prompt.tokens == tokens_of(picture.number, 1)[0])
        images.append((int(first), picture.written.grid))
    return positions_of(length, images)
