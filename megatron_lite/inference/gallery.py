"""The images of prompts, on the rank that receives requests, which reads and encodes them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megaconv.errors import CheckpointError, UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.image_texts import ImageTexts
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.kinds import Joint
from megatron_lite.data.images.reader import ImageReader, Inputs
from megatron_lite.data.images.written import Words, Written, numbered
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.image_tokens import tokens_of

Encode = Callable[[Inputs, int], Tensor]
"""Returns an image's vectors from (the encoder's input, number of its tokens): see Picture. Raises UsageError."""

_RECENT = 16
"""Images that stay known after their request has ended: a conversation shows them again."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image. It stays known as long as a request has it."""

    file: ImageFile
    """With its bytes, if it was read."""
    number: int
    written: Written
    vectors: Tensor = field(repr=False)
    """[1 + further, tokens, hidden], on the CPU: see models.pictures.Pictures."""
    is_whole: bool
    """True if its tokens attend to each other in both directions, so that they have to be read together."""
    token: int
    """The token of the vocabulary that stands for each of its parts."""
    placeholder: str
    """The text that a chat template writes for it."""


def unencoded(
    reader: ImageReader, words: Words, file: ImageFile, number: int, written: Written
) -> Picture:
    """Return an image without its vectors. words: the texts of its tokens."""
    kind = reader.require_kind()
    return Picture(
        file,
        number,
        written,
        vectors=torch.empty(0),
        is_whole=kind.joint(reader.config) is not Joint.NOWHERE,
        token=reader.token,
        placeholder=kind.placeholder(words),
    )


def words_of(reader: ImageReader, tokenizer: HuggingFaceTokenizer) -> Words:
    """Return the texts of the tokens of images. Raises NotExpressible."""
    inner = tokenizer.inner
    return reader.require_kind().words_of(
        reader.config, lambda token: str(inner.convert_ids_to_tokens(token))
    )


class Images(Protocol):
    """The images that a model reads."""

    def load(self) -> None:
        """Load the encoder now. Raises UsageError, TensorMismatch."""
        ...

    def add(self, file: ImageFile, several: bool = False) -> Picture:
        """Read an image. several: True if its chat has several images. Raises UsageError."""
        ...

    def measuring(self) -> "Images":
        """Return the same images for prompts that are only counted: the encoder is not asked."""
        ...


class NoImages:
    """The images of a model that reads none."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def load(self) -> None:
        """Do nothing: there is no encoder."""

    def add(self, file: ImageFile, several: bool = False) -> Picture:
        raise UsageError(self._reason)

    def measuring(self) -> "NoImages":
        return self


TEXT_ALONE = NoImages(
    "this model reads text alone; send no images, or start it with --image-encoder DIR, a multimodal model that reads them"
)


def _content(file: ImageFile) -> bytes:
    """Return the bytes of an image's file. Raises UsageError."""
    if isinstance(file.content, bytes):
        return file.content
    if file.content.exists() and not file.content.is_file():  # a pipe may have no end
        raise UsageError(f"{file}: should be the file of an image")
    try:
        return file.content.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: can't be read: {error.strerror}") from error


class Gallery:
    """The images that a multimodal model reads. Requests add them on one thread, and the model's thread looks at them."""

    def __init__(
        self, reader: ImageReader, words: Words, load_encoder: Callable[[], Encode]
    ) -> None:
        """words: the texts of its tokens. load_encoder: called for the first image, or by `load`."""
        self._reader, self._words, self._load_encoder = reader, words, load_encoder
        self._known: WeakValueDictionary[tuple[bytes, bool], Picture] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, Picture] = WeakValueDictionary()
        self._recent: deque[Picture] = deque(maxlen=_RECENT)
        self._count = 0

    def load(self) -> None:
        """Load the encoder now. Raises UsageError, TensorMismatch."""
        _ = self._encode

    @cached_property
    def _encode(self) -> Encode:
        return self._load_encoder()

    def add(self, file: ImageFile, several: bool = False) -> Picture:
        """Read an image. An image with the same bytes as a known one is the same. Raises UsageError.

        several: see Images.
        """
        content = _content(file)
        kind = self._reader.require_kind()
        is_beside = kind.writer(several) is not kind.write
        key = sha256(content).digest(), is_beside
        picture = self._known.get(key)
        if picture is None:
            picture = self._read(ImageFile(content, file.name or str(file)), is_beside)
            self._known[key] = picture
        self._recent.append(picture)
        return picture

    def measuring(self) -> "_Measured":
        """See Images."""
        return _Measured(self)

    def measured(self, file: ImageFile, number: int, several: bool) -> Picture:
        """Return an image without its vectors. Reads its header alone. Raises UsageError."""
        read = ImageFile(_content(file), str(file))
        try:
            written = self._reader.measure(read, self._words, several)
        except (BadRecord, CheckpointError) as error:
            raise UsageError(str(error)) from error
        return unencoded(self._reader, self._words, read, number, written)

    def _read(self, file: ImageFile, several: bool) -> Picture:
        try:
            written, inputs = self._reader.read(file, self._words, several)
            vectors = self._encode(inputs, written.grid.tokens)
        except (BadRecord, CheckpointError) as error:
            raise UsageError(str(error)) from error
        measured = unencoded(self._reader, self._words, file, self._count, written)
        picture = replace(measured, vectors=vectors)
        self._count += 1
        self._by_number[picture.number] = picture
        return picture

    def picture(self, number: int) -> Picture:
        """Return an image that a request has."""
        return self._by_number[number]


class _Measured:
    """The images of prompts that are only counted, by the sizes in their headers."""

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._count = 0

    def load(self) -> None:
        """Do nothing: the encoder is not asked."""

    def add(self, file: ImageFile, several: bool = False) -> Picture:
        """Measure an image. Raises UsageError."""
        self._count += 1
        return self._gallery.measured(file, self._count, several)

    def measuring(self) -> "_Measured":
        return self


def texts_of(pictures: Sequence[Picture]) -> ImageTexts:
    """Return the texts of a chat's images, of which there is at least one."""
    texts = numbered(picture.written for picture in pictures)
    return ImageTexts(pictures[0].placeholder, texts)


def with_ids_of(pictures: Sequence[Picture], ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a chat with the ids of its images. Raises UsageError."""
    own = [
        token
        for picture in pictures
        for token in tokens_of(picture.number, picture.written.grid.tokens)
    ]
    token = pictures[0].token
    if ids.count(token) != len(own):
        raise UsageError(
            f"the conversation has {ids.count(token)} tokens of images, and its images have {len(own)}; "
            "a text may not contain that token"
        )
    waiting = iter(own)
    return tuple(next(waiting) if each == token else each for each in ids)
