"""Counts the tokens of images, and makes the input of an encoder of them, as transformers does."""

import math
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import NotExpressible, UsageError
from megaconv.extras import require_transformers
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.kinds import KINDS, Axes, ImageKind, kind_of, text_of
from megatron_lite.data.images.outlines import Outline
from megatron_lite.data.images.written import Grid, Processed, Words, Written
from megatron_lite.data.packages import package
from megatron_lite.data.samples import NO_TOKEN

Inputs = Mapping[str, NDArray[Any]]
"""The arguments of transformers' `get_image_features` for one image, by name."""
_ANY_WORDS = Words("\0", "", "")
"""For the number of tokens alone: a word that no text has."""
_KEPT_TEXTS = 256
"""Number of sizes of images whose texts are kept. A text may have 200 kB."""
_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
"""Names in preprocessor_config.json -> names in vision_config."""


class _Added(NamedTuple):
    """An image with a number."""

    file: ImageFile
    size: tuple[int, int]
    """(width, height)."""
    grid: Grid
    where: str
    """File and line of its record."""
    several: bool
    """True if its chat has several images."""


class ImageReader:
    """Reads the images of a run. Each image has a number, in the order of `add`."""

    def __init__(self, directory: Path) -> None:
        """directory: a multimodal model in Hugging Face's files."""
        self.directory = directory
        self.config = load_config(directory / CONFIG_NAME)
        self.kind = kind_of(self.config)
        """None for a model whose images a run can't train on."""
        if self.kind is not None and not isinstance(self.config.get("vision_config"), Mapping):
            raise CorruptCheckpoint(
                f"{directory}: config.json of a {self.config['model_type']} lacks vision_config, the sizes of its encoder"
            )
        self.token = NO_TOKEN if self.kind is None else self.kind.token_of(self.config)
        """The token that stands for each part of an image."""
        self.keeps_ready = True
        """False if this process doesn't encode images, so that `prepare` has nothing to do."""
        self._images: list[_Added] = []
        self._of_size = lru_cache(_KEPT_TEXTS)(self._write_size)
        self._ready: dict[int, Inputs] = {}
        self._follower: ImageReader | None = None

    def require_kind(self) -> ImageKind:
        """Return the kind of the model. Raises NotExpressible for a model whose images a run can't train on."""
        if self.kind is None:
            known = ", ".join({name: None for kind in KINDS for name in kind.model_types})
            raise NotExpressible(
                f"{self.directory}: a run can't train on images of {self.config.get('model_type')!r}; expected one of {known}"
            )
        return self.kind

    def add(
        self, file: ImageFile, words: Words, where: str = "--finetune-data", several: bool = False
    ) -> tuple[int, Written]:
        """Return the number of an image, and its text. Reads its header alone. Raises BadRecord, UsageError, NotExpressible.

        words: the texts of tokens, as `words_of` returns them. where: the image's record, for messages.
        several: True if its chat has several images.
        """
        size = file.size
        written = self._sized(file, size, words, several)
        self._images.append(_Added(file, size, written.grid, where, several))
        return len(self._images) - 1, written

    def followed_by(self, other: "ImageReader") -> None:
        """Give another reader all images with their numbers; it prepares those that this one prepares.

        Raises UsageError if an image has other tokens or positions there, NotExpressible if that model's images can't be read.
        """
        other.require_kind()
        if other.token != self.token:
            raise UsageError(
                f"{other.directory}: its token of images is {other.token}, and that of {self.directory} is {self.token}; choose a model "
                "with the same one"
            )
        if other.axes is not None and self.axes is None:
            raise UsageError(
                f"{other.directory}: its images have positions of frame, row and column, and those of {self.directory} have positions "
                "as a text; choose a model with the same positions"
            )
        for added in {(added.size, added.several): added for added in self._images}.values():
            other._require_same(added, self)
        other._images = self._images
        self._follower = other

    def _require_same(self, image: _Added, other: "ImageReader") -> None:
        """Raise UsageError if an image of another reader has other tokens here."""
        file, size, _, _, several = image
        try:
            own, theirs = (
                reader._sized(file, size, reader._marks(), several) for reader in (self, other)
            )
        except BadRecord as error:
            raise UsageError(f"{self.directory}: {error}") from error
        if own.grid != theirs.grid:
            width, height = size
            raise UsageError(
                f"{self.directory}: makes {own.grid.tokens:,} tokens of an image of {width:,} x {height:,} pixels, and {other.directory} "
                f"{theirs.grid.tokens:,}; give both the same limits in preprocessor_config.json, or choose another model"
            )
        if own != theirs:
            raise UsageError(
                f"{self.directory}: writes other tokens around the parts of an image than {other.directory}; choose a model that writes "
                "the same"
            )

    def _marks(self) -> Words:
        """Return the numbers of tokens as their texts."""
        return self.require_kind().words_of(self.config, "<{}>".format)

    def measure(self, file: ImageFile, words: Words, several: bool = False) -> Written:
        """Return the text of an image, without giving it a number. Reads its header alone. Raises as `add` does."""
        return self._sized(file, file.size, words, several)

    def _sized(
        self, file: ImageFile, size: tuple[int, int], words: Words, several: bool
    ) -> Written:
        """Return the text of an image whose header is read."""
        try:
            return self._of_size(size, words, several)
        except ValueError as error:
            raise _refused(file, error) from error

    def _write_size(self, size: tuple[int, int], words: Words, several: bool) -> Written:
        """Return an image of a size, without its pixels. Raises UsageError, ValueError for a size that is refused."""
        outline = Outline(
            size=size,
            processor=lambda: self._processor,
            arguments=self.require_kind().arguments(self.config),
            blank=lambda: self._processed(_blank(size), several),
        )
        return self._write(outline, words, several)

    def _write(self, processed: Processed, words: Words, several: bool) -> Written:
        """Return an image in a text from the image processor's output. Raises UsageError."""
        write = self.require_kind().writer(several)
        try:
            return write(self.config, processed, words)
        except KeyError as error:
            raise UsageError(
                f"{self.directory}: vision_config and the output of {type(self._processor).__name__} lack {error}; expected the "
                "model's own config.json and preprocessor_config.json"
            ) from error

    def tokens(self, number: int) -> int:
        """Return the number of tokens of an image for which the encoder gives vectors."""
        return self._images[number].grid.tokens

    def content(self, number: int) -> Path | bytes:
        """Return the path of an image without `..` and links, or its bytes. Images of the same path or bytes are the same."""
        content = self._images[number].file.content
        return content if isinstance(content, bytes) else content.resolve()

    def hashed(self, number: int) -> str:
        """Return a hash of an image's file. Raises CorruptCheckpoint for an image that can't be read any more."""
        image = self._images[number]
        try:
            return image.file.hashed()
        except BadRecord as error:
            raise CorruptCheckpoint(f"{image.where}: {error}") from error

    def trial(self) -> tuple[Inputs, int]:
        """Return the encoder's input for a blank image of the size of the smallest image, and the number of its tokens."""
        smallest = min(self._images, key=lambda image: math.prod(image.size))
        return self._processed(_blank(smallest.size), smallest.several), smallest.grid.tokens

    def read(self, file: ImageFile, words: Words, several: bool = False) -> tuple[Written, Inputs]:
        """Return the text of an image, and the encoder's input, without giving it a number. Raises as `add` does."""
        inputs = self._inputs(file.open(), file, several)
        return self._write(inputs, words, several), inputs

    @property
    def axes(self) -> Axes | None:
        """See ImageKind."""
        return None if self.kind is None else self.kind.axes

    @property
    def width(self) -> int | None:
        """The hidden size of its language model; None if config.json doesn't state it, which then has the default of its class."""
        width: int | None = text_of(self.config).get("hidden_size")
        return width

    def prepare(self, number: int) -> None:
        """Read an image now, for `inputs` later."""
        if self.keeps_ready and number not in self._ready:
            self._ready[number] = self._read(number)
        if self._follower is not None:
            self._follower.prepare(number)

    def inputs(self, number: int) -> Inputs:
        """Return the encoder's input for an image. Raises CorruptCheckpoint for an image that can't be read any more."""
        return self._ready.pop(number, None) or self._read(number)

    def _read(self, number: int) -> Inputs:
        added = self._images[number]
        file = added.file
        try:
            image = file.open()
            if image.size != added.size:
                raise BadRecord(f"{file}: has had another size at the start of the run")
            inputs = self._inputs(image, file, added.several)
        except BadRecord as error:
            raise CorruptCheckpoint(f"{added.where}: {error}") from error
        grid = self._write(inputs, _ANY_WORDS, added.several).grid
        if grid != added.grid:
            raise CorruptCheckpoint(
                f"{added.where}: {file}: the image processor makes {grid.tokens} tokens of it, and {added.grid.tokens} "
                "of a blank image of its size; expected the same number"
            )
        return inputs

    def _inputs(self, image: Any, file: ImageFile, several: bool) -> Inputs:
        try:
            return self._processed(image, several)
        except ValueError as error:
            raise _refused(file, error) from error

    def _processed(self, image: Any, several: bool) -> Inputs:
        """Return the output of the image processor. Raises UsageError, ValueError for an image that it refuses."""
        processor, kind = self._processor, self.require_kind()
        arguments = kind.arguments(self.config)
        is_beside = kind.writer(several) is not kind.write
        images = [[image, image]] if is_beside else [image]
        try:
            output = dict(processor(images=images, return_tensors="np", **arguments))
        except (
            Exception
        ) as error:  # such as an image of one row, or settings that contradict each other
            raise ValueError(str(error)) from error
        # The second image was there only to make the first one of several.
        return {name: rows[:1] for name, rows in output.items()} if is_beside else output

    @cached_property
    def _processor(self) -> Any:
        """transformers' image processor of the model. Raises UsageError."""
        transformers = require_transformers("an image")
        directory = self.directory
        try:
            found = transformers.AutoImageProcessor.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # wrong values in its file raise errors of many classes
            reason = " ".join(str(error).split())
            raise UsageError(
                f"{directory}: its image processor can't be made of preprocessor_config.json: {reason:.200}"
            ) from error
        self._require_same_patches(found)
        if not getattr(found, "use_image_id", True):
            raise UsageError(
                f"{directory}: preprocessor_config.json has use_image_id false; expected true: the number of an image is part of "
                "its text"
            )
        return found

    def _require_same_patches(self, processor: Any) -> None:
        """Raise UsageError if the image processor makes other patches than the encoder reads."""
        for name, name_in_config in _PATCHES.items():
            made, read = (
                getattr(processor, name, None),
                self.config["vision_config"].get(name_in_config),
            )
            if isinstance(made, int) and isinstance(read, int) and made != read:
                raise UsageError(
                    f"{self.directory}: preprocessor_config.json has {name} {made}, and vision_config of config.json has "
                    f"{name_in_config} {read}; expected the same value"
                )


def _refused(file: ImageFile, error: Exception) -> BadRecord:
    reason = " ".join(str(error).split())
    return BadRecord(f"{file}: the image processor refuses it: {reason:.200}")


def _blank(size: tuple[int, int]) -> Any:
    """Return a PIL image. size: (width, height)."""
    return package("PIL.Image", "an image", extra="images").new("RGB", size)
