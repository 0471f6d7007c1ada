"""Counts the tokens of images, and makes the input of an encoder of them, as transformers does."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import NotExpressible, UsageError
from megaconv.extras import require_transformers
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.kinds import KINDS, Axes, ImageKind, kind_of, text_of
from megatron_lite.data.images.written import Written
from megatron_lite.data.packages import package
from megatron_lite.data.samples import NO_TOKEN

Inputs = Mapping[str, NDArray[Any]]
"""The arguments of transformers' `get_image_features` for one image, by name."""


class ImageReader:
    """Reads the images of a run. Each image has a number, in the order of `add`."""

    def __init__(self, directory: Path) -> None:
        """directory: a multimodal model in Hugging Face's files."""
        self.directory = directory
        self.config = load_config(directory / CONFIG_NAME)
        self.kind = kind_of(self.config)
        """None for a model whose images a run can't train on."""
        self.token = NO_TOKEN if self.kind is None else self.kind.token_of(self.config)
        """The token that stands for each part of an image."""
        self.keeps_ready = True
        """False if this process doesn't encode images, so that `prepare` has nothing to do."""
        self._files: list[ImageFile] = []
        self._sizes: list[tuple[int, int]] = []
        self._written: dict[tuple[int, int], Written] = {}
        """By the size of an image."""
        self._ready: dict[int, Inputs] = {}

    def require_kind(self) -> ImageKind:
        """Return the kind of the model. Raises NotExpressible for a model whose images a run can't train on."""
        if self.kind is None:
            known = ", ".join({name: None for kind in KINDS for name in kind.model_types})
            raise NotExpressible(
                f"{self.directory}: a run can't train on images of {self.config.get('model_type')!r}; expected one of {known}"
            )
        return self.kind

    def add(self, file: ImageFile, word: str) -> tuple[int, Written]:
        """Return the number of an image, and its text. Reads its header alone. Raises BadRecord, UsageError, NotExpressible.

        word: the text of the token that stands for each part of an image.
        """
        kind, size = self.require_kind(), file.size
        if size not in self._written:
            blank = package("PIL.Image", "an image", extra="images").new("RGB", size)
            self._written[size] = kind.write(self.config, self._processed(blank, file), word)
        self._files.append(file)
        self._sizes.append(size)
        return len(self._files) - 1, self._written[size]

    @property
    def axes(self) -> Axes | None:
        """See ImageKind."""
        return None if self.kind is None else self.kind.axes

    @property
    def is_joint(self) -> bool:
        """See ImageKind."""
        return self.kind is not None and self.kind.is_joint

    @property
    def width(self) -> int | None:
        """The hidden size of its language model; None if config.json doesn't state it, which then has the default of its class."""
        width: int | None = text_of(self.config).get("hidden_size")
        return width

    def prepare(self, number: int) -> None:
        """Read an image now, for `inputs` later."""
        if self.keeps_ready and number not in self._ready:
            self._ready[number] = self._read(number)

    def inputs(self, number: int) -> Inputs:
        """Return the encoder's input for an image. Raises CorruptCheckpoint for an image that can't be read any more."""
        return self._ready.pop(number, None) or self._read(number)

    def _read(self, number: int) -> Inputs:
        file, size = self._files[number], self._sizes[number]
        try:
            image = file.open()
            if image.size != size:
                raise BadRecord(f"{file}: has had another size at the start of the run")
            return self._processed(image, file)
        except BadRecord as error:
            raise CorruptCheckpoint(f"--finetune-data: {error}") from error

    def _processed(self, image: Any, file: ImageFile) -> Inputs:
        arguments = self.require_kind().arguments(self.config)
        try:
            return dict(self._processor(images=[image], return_tensors="np", **arguments))
        except ValueError as error:  # such as an image of one row
            raise BadRecord(f"{file}: the image processor refuses it: {error}") from error

    @cached_property
    def _processor(self) -> Any:
        """transformers' image processor of the model. Raises UsageError."""
        transformers = require_transformers("an image")
        directory = self.directory
        try:
            return transformers.AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"{directory}: its image processor can't be made of preprocessor_config.json: {reason:.200}"
            ) from error
