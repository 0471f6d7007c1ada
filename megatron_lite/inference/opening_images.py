"""Lets a multimodal model read images."""

import argparse

import torch
from torch import Tensor

from formats.errors import CheckpointError, CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.images.reader import ImageReader, Inputs
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.inference.gallery import (
    TEXT_ALONE,
    Encode,
    Gallery,
    Images,
    NoImages,
    words_of,
)
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.shown_images import ShownImages, traits_of
from megatron_lite.objectives.image_encoder import ImageEncoder
from megatron_lite.objectives.image_feeder import axes_tensor, require_same_width
from megatron_lite.objectives.image_models import multimodal_directory
from megatron_lite.settings.contradictions import flag_name


def open_images(given: argparse.Namespace, model: EngineModel, tokenizer: Tokenizer) -> Images:
    """Return the images that a model reads, on rank 0. Call it on every rank. Raises UsageError."""
    reader = _reader(given, tokenizer)
    if isinstance(reader, NoImages):
        return reader
    try:
        return _opened(reader, model, tokenizer)
    except CheckpointError as error:
        if given.image_encoder is not None:
            raise
        return NoImages(str(error))  # texts are read all the same


def _opened(reader: ImageReader, model: EngineModel, tokenizer: Tokenizer) -> Gallery:
    """Let the model read images. Raises CheckpointError."""
    require_same_width(reader, model.engine.config)
    assert isinstance(tokenizer, HuggingFaceTokenizer), "others have no chat template"
    gallery = Gallery(reader, words_of(reader, tokenizer), lambda: _encoder(reader, model))
    axes = axes_tensor(reader, model.engine.config)
    traits = traits_of(reader, None if axes is None else axes.to(model.grid.device))
    model.images = ShownImages(gallery, model.engine, model.length, traits)
    return gallery


def _encoder(reader: ImageReader, model: EngineModel) -> Encode:
    """Load the encoder. Raises UsageError, TensorMismatch."""
    engine = model.engine
    try:
        encoder = ImageEncoder(reader.directory, engine.grid.device, engine.dtype)
    except RuntimeError as error:  # such as too little memory
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{reader.directory}: its encoder can't be loaded: {reason:.200}"
        ) from error

    def encode(inputs: Inputs, tokens: int) -> Tensor:
        try:
            vectors, further = encoder.encode([inputs], tokens)
        except RuntimeError as error:  # such as too little memory
            reason = " ".join(str(error).split())
            raise UsageError(f"an image can't be encoded: {reason:.200}") from error
        return torch.stack((vectors, *further)).cpu()

    return encode


def _reader(given: argparse.Namespace, tokenizer: Tokenizer) -> ImageReader | NoImages:
    """Return the reader of a model's images, or the reason why it reads none. Raises UsageError."""
    directory = multimodal_directory(given.image_encoder, given.load)
    if directory is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return TEXT_ALONE
    for flag in ("draft_tokens", "stream_weights"):
        if getattr(given, flag, None):
            return NoImages(f"{flag_name(flag)} excludes images: start the model without it")
    try:
        reader = ImageReader(directory)
    except CorruptCheckpoint as error:
        return NoImages(str(error))
    if reader.kind is None:
        kind = reader.config.get("model_type")
        return NoImages(f"images of the model type {kind!r} are not supported; send text alone")
    return reader
