"""The images that a record names: files, bytes of a table, or data URIs."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.packages import package

_ORIENTATION = 0x0112
"""The EXIF tag of a photo's orientation."""
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange width and height."""


@dataclass(frozen=True)
class ImageFile:
    """An image, which is opened when it is needed."""

    content: Path | bytes

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), as `open` returns the image. Reads the header alone. Raises BadRecord."""
        with self._read() as image:
            width, height = image.size
            return (height, width) if _orientation(image) in _TURNED else (width, height)

    def open(self) -> Any:
        """Return the PIL image in RGB, turned as its EXIF data says. Raises BadRecord."""
        operations = package("PIL.ImageOps", "an image", extra="images")
        with self._read() as image:
            upright = operations.exif_transpose(image) if _orientation(image) else image
            return upright.convert("RGB")

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """Open the file for PIL, whose errors become BadRecord."""
        pillow = package("PIL.Image", "an image", extra="images")
        file = BytesIO(self.content) if isinstance(self.content, bytes) else self.content
        try:
            with pillow.open(file) as image:
                yield image
        except FileNotFoundError:
            raise BadRecord(
                f"{self}: there is no such image; paths are relative to the directory of the record's file"
            ) from None
        except Exception as error:  # the decoder of a format may raise any error for a damaged file
            raise BadRecord(f"{self}: can't be read as an image: {error}") from error

    def __str__(self) -> str:
        if isinstance(self.content, bytes):
            return f"an image of {len(self.content):,} bytes"
        return str(self.content)


def _orientation(image: Any) -> int | None:
    """Return the orientation of an opened image, without its pixels. PIL looks for a PNG's behind them too."""
    if image.format == "PNG" and "exif" not in image.info:
        return None
    found: int | None = image.getexif().get(_ORIENTATION)
    return found


def read_image(given: Any, directory: Path) -> ImageFile:
    """Return the image that a record names. directory: of the record's file. Raises BadRecord.

    given: a path, a data URI, {"url": ...} as OpenAI writes it, or {"bytes": ..., "path": ...} as tables have it.
    """
    if isinstance(given, Mapping):
        content = given.get("bytes")
        if isinstance(content, bytes):
            return ImageFile(content)
        given = given.get("path") or given.get("url")
    if not isinstance(given, str) or not given:
        raise BadRecord(f"has an image that is no path, found {type(given).__name__}")
    if given.startswith("data:"):
        return ImageFile(_decoded(given))
    if given.startswith(("http://", "https://")):
        raise BadRecord(f"{given}: an image has to be a local file; download it first")
    return ImageFile(directory / given.removeprefix("file://"))


def _decoded(uri: str) -> bytes:
    """Return the bytes of a data URI. Raises BadRecord."""
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRecord("has an image in a data URI that is not in base64")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise BadRecord(f"has an image in a data URI with invalid base64: {error}") from error
