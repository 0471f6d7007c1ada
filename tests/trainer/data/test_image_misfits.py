"""A multimodal model whose files contradict each other is refused before the first step, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CorruptCheckpoint
from megaconv.errors import TensorMismatch, UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.kinds import Axes
from megatron_lite.data.images.positions import axes_of_pairs
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Words
from megatron_lite.objectives.image_encoder import ImageEncoder
from tests.trainer.multimodal import create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle
WORDS = Words("<|image_pad|>", "", "")
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


def change(directory: Path, name: str, edit: Callable[[Any], object]) -> None:
    """Edit a JSON file of a model."""
    content = json.loads((directory / name).read_text())
    edit(content)
    (directory / name).write_text(json.dumps(content))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    create("qwen2_5_vl", tmp_path / "hf")
    write_chats(tmp_path)
    return tmp_path


def add(directory: Path) -> ImageReader:
    """A reader with one image."""
    reader = ImageReader(directory / "hf")
    reader.add(ImageFile(directory / "0.png"), WORDS, "chats.jsonl:1")
    return reader


@pytest.mark.parametrize("value", [None, "clip"])
def test_a_config_without_an_encoder_is_named(value: object, made: Path) -> None:
    change(made / "hf", CONFIG, lambda config: config.update(vision_config=value))
    with pytest.raises(CorruptCheckpoint, match="lacks vision_config, the sizes of its encoder"):
        add(made)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("patch_size", 8, "patch_size 8, and vision_config of config.json has patch_size 4"),
        ("merge_size", 1, "merge_size 1, and vision_config of config.json has spatial_merge_size 2"),
        ("temporal_patch_size", 1, "temporal_patch_size 1, and vision_config"),
    ],
)  # fmt: skip
def test_an_image_processor_with_other_patches_is_refused(
    name: str, value: int, message: str, made: Path
) -> None:
    """The encoder would fail in the first step, or read patches in the wrong order."""
    change(made / "hf", PROCESSOR, lambda processor: processor.update({name: value}))
    with pytest.raises(UsageError, match=message):
        add(made)


def test_an_image_processor_that_leaves_numbers_of_images_out_is_refused(tmp_path: Path) -> None:
    create("minicpmv4_6", tmp_path / "hf")
    write_chats(tmp_path)
    change(tmp_path / "hf", PROCESSOR, lambda processor: processor.update(use_image_id=False))
    with pytest.raises(UsageError, match="has use_image_id false; expected true"):
        add(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"image_processor_type": "Nothing"}'])
def test_a_file_that_describes_no_image_processor_is_named(content: str, made: Path) -> None:
    (made / "hf" / PROCESSOR).write_text(content)
    with pytest.raises(UsageError, match=r"can't be made of preprocessor_config\.json"):
        add(made)


def test_code_beside_an_image_processor_is_not_run_and_not_asked_for(made: Path) -> None:
    """A question would wait for an answer from standard input."""
    foreign = {
        "image_processor_type": "Foreign",
        "auto_map": {"AutoImageProcessor": "code.Foreign"},
    }
    (made / "hf" / PROCESSOR).write_text(json.dumps(foreign))
    (made / "hf" / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(UsageError, match=r"can't be made of preprocessor_config\.json"):
        add(made)


def test_an_image_processor_of_another_kind_of_model_is_refused(made: Path) -> None:
    clip = {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 16, "width": 16}}
    (made / "hf" / PROCESSOR).write_text(json.dumps(clip))
    with pytest.raises(UsageError, match=r"output of CLIPImageProcessor.* lack 'image_grid_thw'"):
        add(made)


def test_an_image_that_does_not_fit_an_image_processor_that_scales_nothing_is_refused(
    made: Path,
) -> None:
    change(made / "hf", PROCESSOR, lambda processor: processor.update(do_resize=False))
    reader = add(made)  # 56 x 40 pixels are whole patches
    assert reader.tokens(0) == 35
    with pytest.raises(BadRecord, match=r"3\.png: the image processor refuses it: cannot reshape"):
        reader.add(ImageFile(made / "3.png"), WORDS)


def test_an_image_that_is_damaged_after_its_header_is_named_with_its_record(made: Path) -> None:
    content = (made / "0.png").read_bytes()
    (made / "0.png").write_bytes(content[:500])
    with pytest.raises(CorruptCheckpoint, match=r"chats.jsonl:1: .*0.png: can't be read as"):
        add(made).inputs(0)


def encoder_of(directory: Path) -> ImageEncoder:
    return ImageEncoder(directory / "hf", torch.device("cpu"), torch.float32)


def test_an_encoder_that_reads_images_of_another_size_is_refused(tmp_path: Path) -> None:
    create("llava", tmp_path / "hf")
    write_chats(tmp_path)
    crop = {"height": 24, "width": 24}
    change(tmp_path / "hf", PROCESSOR, lambda processor: processor.update(crop_size=crop))
    image, tokens = add(tmp_path).trial()
    encoder = encoder_of(tmp_path)
    with pytest.raises(UsageError, match=r"can't read an image .* doesn't match model"):
        encoder.require_fitting(image, tokens)
    with pytest.raises(UsageError, match=r"can't read an image .* doesn't match model"):
        encoder.encode([image], tokens)


def test_an_encoder_with_another_number_of_vectors_is_refused(made: Path) -> None:
    image, tokens = add(made).trial()
    encoder = encoder_of(made)
    assert len(encoder.encode([image], tokens).vectors) == tokens == 35
    with pytest.raises(UsageError, match="makes 35 vectors of images of 36 tokens"):
        encoder.encode([image], 36)


def test_an_encoder_of_damaged_weights_is_refused(made: Path) -> None:
    path = made / "hf" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "visual" in name)
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})
    image, tokens = add(made).trial()
    with pytest.raises(TensorMismatch, match="NaN or infinite; its weights are damaged"):
        encoder_of(made).require_fitting(image, tokens)


@pytest.mark.parametrize("sections", [[1, 1, 1], "no", [2, 2], [2, 1, 1.0], [5, 0, -1]])
def test_sections_of_axes_that_do_not_fit_are_named(sections: Any) -> None:
    config = {"text_config": {"rope_parameters": {"mrope_section": sections}}}
    for axes in (Axes((2, 1, 1), interleaved=False), Axes((2, 1, 1), interleaved=True)):
        with pytest.raises(CorruptCheckpoint, match="three numbers whose sum is 4"):
            axes_of_pairs(axes, config, 4)


def quantize(directory: Path, part: str) -> None:
    """Quantize the projections of a part of the model to FP8, as on the Hub."""
    path = directory / "model.safetensors"
    made = {}
    for name, tensor in load_file(path).items():
        if part in name and tensor.ndim == 2 and name.endswith("proj.weight"):
            scale = tensor.abs().max() / 448
            made[f"{name}_scale_inv"] = scale.reshape(1, 1)
            tensor = (tensor / scale).to(torch.float8_e4m3fn)
        made[name] = tensor
    save_file(made, path, metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    change(directory, CONFIG, lambda config: config.update(quantization_config=how))


def test_the_encoder_of_a_quantized_language_model_is_read(made: Path) -> None:
    """transformers would ask for accelerate, and for a GPU."""
    image, tokens = add(made).trial()
    expected = encoder_of(made).encode([image], tokens).vectors
    quantize(made / "hf", "layers.")
    assert torch.equal(encoder_of(made).encode([image], tokens).vectors, expected)


def test_a_quantized_encoder_is_refused(made: Path) -> None:
    """Without the scales, its weights would be others."""
    quantize(made / "hf", "visual.")
    with pytest.raises(UsageError, match=r"its encoder is quantized: the files have .*scale_inv"):
        encoder_of(made)
