"""The tokens of an image are counted without its pixels, as the image processor counts them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.outlines import Outline, grid_of
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Words
from tests.trainer.multimodal import create, write_chats

PIL_Image = pytest.importorskip("PIL.Image", reason="needs pillow")
LIMITS: Mapping[str, Any] = {
    "patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192},
}  # fmt: skip
SCALING = (
    "Qwen2VLImageProcessorPil",
    "Glm4vImageProcessorPil",
    "Glm46VImageProcessorPil",
    "PaddleOCRVLImageProcessorPil",
)


def processor_of(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**LIMITS, **settings)


def outcome(compute: Any) -> Any:
    """The result, or None if the size is refused."""
    try:
        return tuple(map(int, compute()))
    except ValueError:
        return None


@pytest.mark.oracle
@pytest.mark.parametrize("name", SCALING)
def test_a_grid_is_that_of_the_processed_pixels(name: str) -> None:
    processor = processor_of(name)
    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 300), (900, 3), *random.integers(1, 300, (40, 2)).tolist()]
    for width, height in sizes:
        image = PIL_Image.new("RGB", (width, height))
        processed = outcome(
            lambda: processor(images=[image], return_tensors="np")["image_grid_thw"][0]  # noqa: B023
        )
        assert outcome(lambda: grid_of(processor, width, height)) == processed  # noqa: B023


@pytest.mark.oracle
def test_a_processor_that_scales_in_another_way_is_asked() -> None:
    assert grid_of(processor_of("CLIPImageProcessorPil"), 30, 20) is None
    assert grid_of(processor_of("Qwen2VLImageProcessorPil", do_resize=False), 32, 32) is None


def test_other_output_is_computed_once_and_when_it_is_needed() -> None:
    calls: list[int] = []

    def blank() -> Mapping[str, Any]:
        calls.append(1)
        return {"image_sizes": [[3, 4]], "pixel_values": 0}

    outline = Outline(processor=object, size=(3, 4), blank=blank)
    assert not calls
    assert outline["image_sizes"] == [[3, 4]]
    assert set(outline) == {"image_sizes", "pixel_values"}
    assert len(outline) == 2
    assert calls == [1]


@pytest.mark.oracle
def test_images_of_many_sizes_are_counted_in_no_time(tmp_path: Path) -> None:
    """Their pixels are not processed: the image processor isn't called."""
    create("qwen2_5_vl", tmp_path / "model")
    reader = ImageReader(tmp_path / "model")
    write_chats(tmp_path)
    number, written = reader.add(ImageFile(tmp_path / "0.png"), Words("-", "", ""))
    assert written == ("-" * 35, (1, 5, 7))
    assert reader.tokens(number) == 35
    reader._processed = None  # type: ignore[assignment, method-assign]
    assert reader.add(ImageFile(tmp_path / "1.png"), Words("-", "", "")) == (
        1,
        ("-" * 9, (1, 3, 3)),
    )
