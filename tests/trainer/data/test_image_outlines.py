"""The tokens of an image are counted without its pixels, as the image processor counts them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.outlines import WITHOUT_PIXELS, Outline
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Words, write_anyres
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


def outcome(compute: Callable[[], Any], all_rows: bool) -> Any:
    """The first row of a field, or all; None if the size is refused, or left to the processor that refuses it."""
    try:
        rows = compute()
    except ValueError:
        return None
    return None if rows is None else np.ravel(rows if all_rows else rows[0]).tolist()


def assert_computed_as_processed(
    field: str,
    processor: Any,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    all_rows: bool = False,
) -> None:
    """The field follows from the sizes of images."""
    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 300), (900, 3), *random.integers(1, 300, (30, 2)).tolist()]

    def processed(width: int, height: int) -> Any:
        image = PIL_Image.new("RGB", (width, height))
        return processor(images=[image], return_tensors="np", **arguments)[field]

    for size in sizes:
        found = outcome(lambda: WITHOUT_PIXELS[field](processor, *size, arguments), all_rows)  # noqa: B023
        assert found == outcome(lambda: processed(*size), all_rows), size  # noqa: B023


@pytest.mark.oracle
@pytest.mark.parametrize("name", SCALING)
def test_a_grid_is_that_of_the_processed_pixels(name: str) -> None:
    import transformers

    assert_computed_as_processed("image_grid_thw", getattr(transformers, name)(**LIMITS))


@pytest.mark.oracle
def test_tiles_are_those_of_the_processed_pixels() -> None:
    import transformers

    side = {"height": 16, "width": 16}
    processor = transformers.GotOcr2ImageProcessorPil(size=side, max_patches=6)
    assert_computed_as_processed("num_patches", processor, {"crop_to_patches": True})


@pytest.mark.oracle
def test_a_scaled_size_is_that_of_the_processed_pixels() -> None:
    import transformers

    processor = transformers.PixtralImageProcessorPil(size={"longest_edge": 60})
    assert_computed_as_processed("image_sizes", processor, {"patch_size": 8})


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlavaNextImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": 16}),
        ("LlavaOnevisionImageProcessorPil", {"size": {"height": 16, "width": 16}}),
    ],
)
def test_a_size_before_scaling_is_that_of_the_processed_pixels(
    name: str, settings: Mapping[str, Any]
) -> None:
    import transformers

    tiles = [[32, 16], [16, 32]]
    processor = getattr(transformers, name)(**settings, image_grid_pinpoints=tiles)
    assert_computed_as_processed("image_sizes", processor)


@pytest.mark.oracle
def test_the_tokens_of_many_sizes_are_those_of_llava_onevision() -> None:
    """With the sizes of published models. The patches of large images are scaled down."""
    import transformers

    images = transformers.LlavaOnevisionImageProcessorPil()
    processor = object.__new__(transformers.LlavaOnevisionProcessor)
    fields = {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"}
    vars(processor).update(**fields, image_processor=images)
    config = {
        "vision_config": {"image_size": 384, "patch_size": 14},
        "image_grid_pinpoints": images.image_grid_pinpoints,
    }
    random = np.random.default_rng(0)
    for height, width in random.integers(20, 5000, (200, 2)).tolist():
        expected = processor._get_number_of_features(height, width, 384, 384)
        written = write_anyres(config, {"image_sizes": [(height, width)]}, Words("-", "", ""))
        assert written.grid.tokens == expected, (height, width)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["SmolVLMImageProcessorPil", "Idefics3ImageProcessorPil"])
@pytest.mark.parametrize("splits", [True, False])
def test_rows_and_columns_are_those_of_the_processed_pixels(name: str, splits: bool) -> None:
    import transformers

    processor = getattr(transformers, name)(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 16}, do_image_splitting=splits
    )
    for field in ("rows", "cols"):
        assert_computed_as_processed(field, processor, {"return_row_col_info": True})


@pytest.mark.oracle
@pytest.mark.parametrize("crops", [True, False])
def test_grids_of_tiles_are_those_of_the_processed_pixels(crops: bool) -> None:
    import transformers

    processor = transformers.Ovis2ImageProcessorPil(
        size={"height": 16, "width": 16}, max_patches=6, crop_to_patches=crops
    )
    assert_computed_as_processed("grids", processor)


@pytest.mark.oracle
@pytest.mark.parametrize("field", ["grids", "target_sizes"])
@pytest.mark.parametrize("settings", [{}, {"slice_mode": False}, {"downsample_mode": "4x"}])
def test_slices_are_those_of_the_processed_pixels(field: str, settings: Mapping[str, Any]) -> None:
    import transformers

    processor = transformers.MiniCPMV4_6ImageProcessorPil(
        scale_resolution=32, patch_size=4, max_slice_nums=6, **settings
    )
    assert_computed_as_processed(field, processor, all_rows=field == "target_sizes")


@pytest.mark.oracle
def test_soft_tokens_are_those_of_the_processed_pixels() -> None:
    import transformers

    processor = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    assert_computed_as_processed("num_soft_tokens_per_image", processor)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("field", "name", "settings"),
    [
        ("num_patches", "Cohere2VisionImageProcessor", {"size": {"height": 16, "width": 16}, "max_patches": 6}),
        ("num_patches", "Cohere2VisionImageProcessor", {"size": {"height": 16, "width": 16}, "crop_to_patches": False}),
        ("num_soft_tokens_per_image", "Gemma4UnifiedImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
    ],
)  # fmt: skip
def test_fields_are_those_of_processors_that_need_torchvision(
    field: str, name: str, settings: Mapping[str, Any]
) -> None:
    pytest.importorskip("torchvision", reason=f"transformers' {name} needs torchvision")
    import transformers

    assert_computed_as_processed(field, getattr(transformers, name)(**settings))


@pytest.mark.oracle
def test_a_processor_that_works_in_another_way_is_asked() -> None:
    import transformers

    clip = transformers.CLIPImageProcessorPil()
    for compute in WITHOUT_PIXELS.values():
        assert compute(clip, 30, 20, {}) is None
    unscaled = transformers.Qwen2VLImageProcessorPil(do_resize=False)
    assert WITHOUT_PIXELS["image_grid_thw"](unscaled, 28, 28, {}) is None


def test_other_output_is_computed_once_and_when_it_is_needed() -> None:
    calls: list[int] = []

    def blank() -> Mapping[str, Any]:
        calls.append(1)
        return {"image_crops": [[3, 4]], "pixel_values": 0}

    outline = Outline((3, 4), processor=object, arguments={}, blank=blank)
    assert not calls
    assert outline["image_crops"] == [[3, 4]]
    assert set(outline) == {"image_crops", "pixel_values"}
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
