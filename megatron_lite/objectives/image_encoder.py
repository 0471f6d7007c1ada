"""A multimodal model's encoder of images with its projector, as transformers computes it. It is not trained."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from formats.wording import counted
from megaconv.errors import TensorMismatch, UsageError
from megaconv.extras import require_transformers
from megatron_lite.data.images.reader import Inputs
from megatron_lite.models.moving import moved
from megatron_lite.objectives.image_borders import with_borders

_EXPECTED = "expected the model's own config.json and preprocessor_config.json"


class Features(NamedTuple):
    """The output of an encoder for images, in their order."""

    vectors: Tensor
    """[tokens, hidden]."""
    further: tuple[Tensor, ...]
    """[tokens, hidden] each: for the output of the first layers."""


class ImageEncoder:
    """The encoder of a multimodal model."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load the encoder. The language model is left out. Raises UsageError, TensorMismatch for a missing weight."""
        transformers = require_transformers("an image")
        try:
            config = transformers.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            _take_out_layers(config.text_config)
            # Usually the language model alone is quantized. An encoder that is quantized too is refused below.
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            with _quiet(transformers.utils.logging):
                whole, found = transformers.AutoModelForImageTextToText.from_pretrained(
                    directory,
                    config=config,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,  # no pickle is read
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"{directory}: transformers can't load its encoder: {reason:.200}"
            ) from error
        model = whole.model
        for name in ("language_model", "text_model"):
            if hasattr(model, name):
                setattr(model, name, None)
        _require_all(model, found["missing_keys"], directory)
        _require_unquantized(model, found["unexpected_keys"], directory)
        self._model = model.to(device).requires_grad_(False).eval()
        self._directory, self._device, self._dtype = directory, device, dtype

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def encode(self, images: Sequence[Inputs], tokens: int) -> Features:
        """Return the features of images. Raises UsageError if the encoder reads other images, or makes other vectors.

        images: the inputs of each, as ImageReader makes them. tokens: number of their tokens.
        """
        try:
            features = self._encoded(images)
        except ValueError as error:
            raise self._contradiction(error) from error
        if len(features.vectors) != tokens:
            raise UsageError(
                f"{self._directory}: its encoder makes {len(features.vectors):,} vectors of images of {tokens:,} tokens; {_EXPECTED}"
            )
        return features

    def require_fitting(self, image: Inputs, tokens: int) -> None:
        """Encode an image, to see that it can be encoded. Raises UsageError, TensorMismatch for damaged weights."""
        try:
            vectors = self.encode([image], tokens).vectors
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's code may raise any error
            raise self._contradiction(error) from error
        if not vectors.isfinite().all():
            raise TensorMismatch(
                f"{self._directory}: the output of its encoder has numbers that are NaN or infinite; its weights are damaged, or "
                f"too large for {str(vectors.dtype).removeprefix('torch.')}"
            )

    def _contradiction(self, error: Exception) -> UsageError:
        reason = " ".join(str(error).split())
        return UsageError(
            f"{self._directory}: its encoder can't read an image of its image processor: {reason:.200}; {_EXPECTED}"
        )

    @torch.no_grad()
    def _encoded(self, images: Sequence[Inputs]) -> Features:
        made = [self._encode_together(list(alike)) for _, alike in groupby(images, self._shapes)]
        vectors, further = zip(*made, strict=True)
        return Features(torch.cat(vectors), tuple(map(torch.cat, zip(*further, strict=True))))

    def _encode_together(self, images: Sequence[Inputs]) -> Features:
        """Return the features of images whose inputs have the same shapes."""
        arguments = {name: self._joined(images, name) for name in self._taken(images[0])}
        output = self._model.get_image_features(**arguments)
        further = getattr(output, "deepstack_features", None) or ()
        borders = getattr(output, "visual_indicator_features", None)
        parts = output.pooler_output
        if borders is not None:
            parts = with_borders(parts, borders, [image["grids"][0] for image in images])
        # Each entry has one tensor for each image.
        return Features(
            torch.cat(tuple(parts)),
            tuple(torch.cat(tuple(each)) for each in further),
        )

    def _shapes(self, image: Inputs) -> list[tuple[int, ...]]:
        """Return the shapes of an image's arguments without their first axis, along which those of several images are joined."""
        return [image[name].shape[1:] for name in self._taken(image)]

    def _taken(self, image: Inputs) -> list[str]:
        """Return the names of the arguments. An image processor returns others too, such as the number of tiles."""
        known = signature(self._model.get_image_features).parameters
        return [name for name in image if name in known]

    def _joined(self, images: Sequence[Inputs], name: str) -> Tensor:
        """Return an argument of all images."""
        # MiniCPM-V has the patches of all images in one row.
        axis = -1 if name == "pixel_values" and "target_sizes" in images[0] else 0
        joined = torch.from_numpy(np.concatenate([image[name] for image in images], axis))
        dtype = self._dtype if joined.is_floating_point() else joined.dtype
        return moved(joined.to(dtype), self._device)


def _require_all(model: torch.nn.Module, missing: Iterable[str], directory: Path) -> None:
    """Raise TensorMismatch if a weight of the encoder is not in the files. transformers fills it with random numbers."""
    needed = {f"model.{name}" for name in model.state_dict()}
    lacking = sorted(needed.intersection(missing))
    if lacking:
        raise TensorMismatch(
            f"{directory}: its files lack {counted(len(lacking), 'tensor')} of the encoder, such as {lacking[0]}; "
            "expected the files of the whole multimodal model"
        )


def _require_unquantized(
    model: torch.nn.Module, unexpected: Iterable[str], directory: Path
) -> None:
    """Raise UsageError if the files have scales of the encoder's weights, or other tensors that its modules lack."""
    modules = {f"model.{name}" for name, _ in model.named_modules() if name}
    others = sorted(name for name in unexpected if name.rpartition(".")[0] in modules)
    if others:
        raise UsageError(
            f"{directory}: its encoder is quantized: the files have {others[0]}; give the original model, or one whose language "
            "model alone is quantized"
        )


def _take_out_layers(text_config: Any) -> None:
    """Change a language model's config, so that its layers are neither built nor read."""
    text_config.num_hidden_layers = 0
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = []
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if hasattr(text_config, name):
            setattr(text_config, name, 0)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep transformers from saying that the files have layers which the model lacks, and from drawing a bar.

    logging: its module.
    """
    before, draws = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if draws:
            logging.enable_progress_bar()
