"""Images that a second model reads too, a teacher: they have the same tokens, and are read in advance for both."""

from pathlib import Path

import numpy as np
import pytest

from megaconv.errors import NotExpressible, UsageError
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Words
from tests.trainer.multimodal import create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
WORDS = Words("<|image_pad|>", "", "")


def readers(directory: Path, own: str, other: str) -> tuple[ImageReader, ImageReader]:
    """The reader of one model, which has all images, and that of another one."""
    write_chats(directory)
    found = []
    for name, kind in (("own", own), ("other", other)):
        create(kind, directory / name)
        found.append(ImageReader(directory / name))
    for number in range(4):
        found[0].add(ImageFile(directory / f"{number}.png"), WORDS)
    return found[0], found[1]


def test_an_image_is_prepared_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = readers(tmp_path, "qwen2_5_vl", "qwen2_vl")
    own.followed_by(other)
    opened: list[str] = []
    open_image = ImageFile.open
    monkeypatch.setattr(
        ImageFile, "open", lambda file: (opened.append(str(file)), open_image(file))[1]
    )
    own.prepare(2)
    assert [Path(name).name for name in opened] == ["2.png"] * 2
    one, second = own.inputs(2), other.inputs(2)
    assert np.array_equal(one["pixel_values"], second["pixel_values"])
    assert own.tokens(2) == other.tokens(2)
    assert len(opened) == 2


def test_a_process_without_the_second_encoder_prepares_its_own_images(tmp_path: Path) -> None:
    own, other = readers(tmp_path, "qwen2_5_vl", "qwen2_vl")
    own.followed_by(other)
    other.keeps_ready = False
    own.prepare(0)
    assert (len(own._ready), len(other._ready)) == (1, 0)


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        ("exaone4_5", "qwen2_5_vl", "its images have positions of frame, row and column"),
        ("gemma3", "llava", "writes other tokens around the parts of an image than"),
        ("qwen2_5_vl", "llava", "makes 16 tokens of an image of 56 x 40 pixels, and "),
    ],
)
def test_a_model_that_reads_other_tokens_is_refused(
    own: str, other: str, words: str, tmp_path: Path
) -> None:
    one, second = readers(tmp_path, own, other)
    with pytest.raises(UsageError, match=rf"^{second.directory}: {words}"):
        one.followed_by(second)


def test_a_model_whose_images_cannot_be_read_is_refused(tmp_path: Path) -> None:
    own, other = readers(tmp_path, "qwen2_5_vl", "qwen2_5_vl")
    other.kind = None
    with pytest.raises(NotExpressible, match=f"^{other.directory}: a run can't train on images"):
        own.followed_by(other)
