"""The images that a record names: files, bytes of a table, or data URIs."""

import base64
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import blake3

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.packages import package

_ORIENTATION = 0x0112
"""The EXIF tag of a photo's orientation."""
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange width and height."""
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_PROGRAM = "EPS"
"""The format of images that pillow starts another program for, Ghostscript."""
_LONGEST_NAME = 200
"""Characters of a path in a message."""


@dataclass(frozen=True)
class ImageFile:
    """An image, which is opened when it is needed."""

    content: Path | bytes
    name: str = ""
    """The path that a table states for bytes."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), as `open` returns the image. Reads the header alone. Raises BadRecord."""
        with self._read() as image:
            if _orientation(image) not in _TURNED:
                return _size(image)
            if image.format == "TIFF":  # PIL turns it, before or while it reads the pixels
                return _size(_upright(image))
            width, height = image.size
            return height, width

    def open(self) -> Any:
        """Return the PIL image in RGB, turned as its EXIF data says. Raises BadRecord."""
        with self._read() as image:
            upright = _upright(image) if _orientation(image) else image
            return upright.convert("RGB")

    def hashed(self) -> str:
        """Return a hash of the file, in hexadecimal digits. Raises BadRecord."""
        try:
            content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        except OSError as error:
            raise BadRecord(f"{self}: can't be read: {error.strerror}") from error
        return blake3.blake3(content).hexdigest()

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """Open the file for PIL, whose errors become BadRecord."""
        pillow = package("PIL.Image", "an image", extra="images")
        file = BytesIO(self.content) if isinstance(self.content, bytes) else self.content
        try:
            if isinstance(file, Path) and file.exists() and not file.is_file():
                raise BadRecord(
                    f"{self}: is a directory, a pipe or a device; expected an image file"
                )
            with pillow.open(file) as image:
                if image.format == _PROGRAM:
                    raise BadRecord(f"{self}: is a program in PostScript; convert it to PNG")
                yield image
        except BadRecord:
            raise
        except FileNotFoundError:
            raise BadRecord(
                f"{self}: there is no such image; paths are relative to the directory of the record's file"
            ) from None
        except package("PIL", "an image", extra="images").UnidentifiedImageError:
            raise BadRecord(
                f"{self}: can't be read as an image: pillow doesn't know its format"
            ) from None
        except Exception as error:  # the decoder of a format may raise any error for a damaged file
            reason = " ".join(str(error).split())
            raise BadRecord(f"{self}: can't be read as an image: {reason:.200}") from error

    def __str__(self) -> str:
        if isinstance(self.content, bytes):
            name = f" ({_shortened(self.name)})" if self.name else ""
            return f"an image of {len(self.content):,} bytes{name}"
        return _shortened(str(self.content))


def _size(image: Any) -> tuple[int, int]:
    width, height = image.size
    return width, height


def _upright(image: Any) -> Any:
    """Return an image turned as its EXIF data says. Reads its pixels."""
    return package("PIL.ImageOps", "an image", extra="images").exif_transpose(image)


def _orientation(image: Any) -> int | None:
    """Return the orientation of an opened image, without its pixels. PIL looks for a PNG's behind them too."""
    if image.format == "PNG" and not _may_be_turned(image.info):
        return None
    found: int | None = image.getexif().get(_ORIENTATION)
    return found


def _may_be_turned(info: Mapping[Any, Any]) -> bool:
    """Return whether a PNG has EXIF data, in its own chunk or as ImageMagick writes it, or an orientation in XMP."""
    if "exif" in info or "Raw profile type exif" in info:
        return True
    return "Orientation" in str(info.get("XML:com.adobe.xmp", ""))


def _shortened(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}...{name[-half:]}"


def read_image(given: Any, directory: Path) -> ImageFile:
    """Return the image that a record names. directory: of the record's file. Raises BadRecord.

    given: a path, a data URI, {"url": ...} as OpenAI writes it, or {"bytes": ..., "path": ...} as tables have it.
    """
    if isinstance(given, Mapping):
        content, path = given.get("bytes"), given.get("path")
        if isinstance(content, bytes) and content:
            return ImageFile(content, path if isinstance(path, str) else "")
        given = path or given.get("url")
    if not isinstance(given, str) or not given:
        raise BadRecord(f"has an image that is no path, found {type(given).__name__}")
    if given.startswith("data:"):
        return ImageFile(read_data_uri(given))
    if given.startswith("file://"):
        return ImageFile(_path_of_uri(given, directory))
    if _ADDRESS.match(given):
        raise BadRecord(f"{_shortened(given)}: an image has to be a local file; download it first")
    return ImageFile(directory / given)


def _path_of_uri(uri: str, directory: Path) -> Path:
    """Return the path of a `file://`. Some programs write a space as %20, others as it is."""
    path = uri.removeprefix("file://")
    literal = directory / path
    return literal if "%" not in path or literal.is_file() else directory / unquote(path)


def read_data_uri(uri: str) -> bytes:
    """Return the bytes of a data URI. Raises BadRecord."""
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRecord("has an image in a data URI that is not in base64")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise BadRecord(f"has an image in a data URI with invalid base64: {error}") from error
