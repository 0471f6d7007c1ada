"""Files of images: the pixels that transformers reads, and what is no image."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.images.files import ImageFile, read_image

PIL_Image = pytest.importorskip("PIL.Image", reason="needs pillow")
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def picture(width: int = 30, height: int = 20) -> Any:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return PIL_Image.fromarray(pixels)


def exif_of(orientation: int) -> Any:
    exif = PIL_Image.Exif()
    exif[0x0112] = orientation
    return exif


def assert_read_as_by_transformers(path: Path) -> None:
    from transformers.image_utils import load_image

    image = ImageFile(path).open()
    assert ImageFile(path).size == image.size
    assert (np.asarray(image) == np.asarray(load_image(str(path)))).all()


@pytest.mark.oracle
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_by_transformers(
    orientation: int, ending: str, tmp_path: Path
) -> None:
    """The header of a TIFF may have the size before or after PIL turns it."""
    path = tmp_path / f"a.{ending}"
    picture().save(path, exif=exif_of(orientation))
    assert_read_as_by_transformers(path)


@pytest.mark.oracle
@pytest.mark.parametrize("by", ["xmp", "profile"])
def test_a_png_is_turned_by_xmp_or_by_the_profile_of_imagemagick(by: str, tmp_path: Path) -> None:
    from PIL.PngImagePlugin import PngInfo

    information = PngInfo()
    if by == "xmp":
        information.add_itxt("XML:com.adobe.xmp", XMP)
    else:
        profile = b"Exif\0\0" + exif_of(6).tobytes().removeprefix(b"Exif\0\0")
        text = f"\nexif\n{len(profile):8d}\n{profile.hex()}\n"
        information.add_text("Raw profile type exif", text, zip=True)
    picture().save(tmp_path / "a.png", pnginfo=information)
    assert ImageFile(tmp_path / "a.png").size == (20, 30)
    assert_read_as_by_transformers(tmp_path / "a.png")


@pytest.mark.oracle
@pytest.mark.parametrize("mode", ["P", "1", "L", "LA", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "F"])
def test_pixels_of_every_mode_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    if mode in ("I;16", "F"):
        numbers = np.random.default_rng(0).integers(0, 60000, (20, 30))
        image = PIL_Image.fromarray(numbers.astype(np.uint16 if mode == "I;16" else np.float32))
    else:
        image = picture().convert(mode)
    is_tiff = mode in ("CMYK", "YCbCr", "LAB", "F")
    path = tmp_path / ("a.tif" if is_tiff else "a.png")
    image.save(path)
    assert_read_as_by_transformers(path)


@pytest.mark.oracle
@pytest.mark.parametrize("ending", ["gif", "webp", "png"])
def test_an_animation_is_its_first_frame(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    picture().save(path, save_all=True, append_images=[picture().rotate(180)])
    assert_read_as_by_transformers(path)


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(BadRecord, match="is a directory, a pipe or a device"):
        _ = ImageFile(path).size


def test_a_program_is_not_executed_to_draw_an_image(tmp_path: Path) -> None:
    """pillow would start Ghostscript for it, also for an image that a client of the server sends."""
    picture().save(tmp_path / "a.eps")
    content = (tmp_path / "a.eps").read_bytes()
    for file in (ImageFile(tmp_path / "a.eps"), ImageFile(content)):
        with pytest.raises(BadRecord, match="is a program in PostScript; convert it to PNG"):
            _ = file.size
        with pytest.raises(BadRecord, match="is a program in PostScript; convert it to PNG"):
            file.open()


def test_a_file_uri_may_have_spaces_or_their_codes(tmp_path: Path) -> None:
    picture().save(tmp_path / "a b.png")
    picture(8, 8).save(tmp_path / "a%20b.png")
    assert read_image(f"file://{tmp_path}/a b.png", tmp_path).size == (30, 20)
    assert read_image(f"file://{tmp_path}/a%20b.png", tmp_path).size == (8, 8)
    (tmp_path / "a%20b.png").unlink()
    assert read_image(f"file://{tmp_path}/a%20b.png", tmp_path).size == (30, 20)


def test_bytes_that_are_no_image_are_named_as_their_table_does(tmp_path: Path) -> None:
    for given, name in (
        ({"bytes": b"no image", "path": "cat.png"}, " (cat.png)"),
        ({"bytes": b"no image"}, ""),
    ):
        with pytest.raises(BadRecord) as caught:
            _ = read_image(given, tmp_path).size
        assert str(caught.value) == (
            f"an image of 8 bytes{name}: can't be read as an image: pillow doesn't know its format"
        )
    picture().save(tmp_path / "a.png")
    assert read_image({"bytes": b"", "path": "a.png"}, tmp_path).size == (30, 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s3://bucket/a.png", "s3://bucket/a.png: an image has to be a local file; download it first"),
        ("x" * 4000, r"\.\.\.x{100}: can't be read as an image"),
    ],
)  # fmt: skip
def test_an_address_or_a_name_without_end_is_refused_in_a_short_line(
    given: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRecord, match=message) as caught:
        _ = read_image(given, tmp_path).size
    assert len(str(caught.value)) < 500
