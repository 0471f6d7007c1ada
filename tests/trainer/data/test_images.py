"""Images of finetuning data: the records that name them, their tokens and positions, and what is refused."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.errors import CorruptCheckpoint
from megaconv.errors import NotExpressible, UsageError
from megatron_lite.data.content_parts import with_parts
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.forms import Chat, read_record
from megatron_lite.data.finetuning.image_dataset import ImageDataset
from megatron_lite.data.finetuning.pieces import pieces_for
from megatron_lite.data.finetuning.record_images import with_images
from megatron_lite.data.finetuning.splits import split_datasets
from megatron_lite.data.images.files import ImageFile, read_image
from megatron_lite.data.images.kinds import KINDS, Axes, Joint, kind_of
from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.images.positions import axes_of_pairs, positions_of
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Grid, Words
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.trainer.multimodal import TEMPLATE, chats, create, token, write_chats

PIL_Image = pytest.importorskip("PIL.Image", reason="needs pillow")
WORDS = Words("<|image_pad|>", "", "")
PAD = token("<|image_pad|>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create("qwen3_vl", directory)
    return directory


def read(model: Path, path: Path, template: str | None = None) -> Examples:
    tokenizer = HuggingFaceTokenizer(str(model))
    options = ReadingOptions(images=ImageReader(model), chat_template=template)
    return read_examples([str(path)], tokenizer, options)


def chat_of(record: Mapping[str, Any]) -> Chat:
    example = read_record(record).example
    assert isinstance(example, Chat)
    return with_images(example, record)


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "yes"}
    return {"messages": [{"role": "user", "content": content}, answer], **fields}


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "a cat?"}


# Records.


@pytest.mark.parametrize(
    "record",
    [
        asked([{"type": "image", "image": "a.png"}, TEXT]),
        asked([{"type": "image_url", "image_url": "a.png"}, TEXT]),
        asked([{"type": "image", "path": "a.png"}, TEXT]),
        asked([IMAGE, TEXT], images=["a.png"]),
        asked("a cat?", images=["a.png"]),
        asked("a cat?", image="a.png"),
        asked("<image>a cat?", images=["a.png"]),
        {
            "conversations": [
                {"from": "human", "value": "<image>a cat?"},
                {"from": "gpt", "value": "yes"},
            ],
            "image": "a.png",
        },
    ],
)
def test_every_form_of_an_image_is_the_same_chat(record: Mapping[str, Any]) -> None:
    chat = chat_of(record)
    assert chat.images == ["a.png"]
    assert chat.messages[0]["content"] == [IMAGE, TEXT]
    assert chat.messages[1]["content"] == "yes"


def test_images_stay_in_the_order_of_their_places() -> None:
    own = {"type": "image", "image": "own.png"}
    chat = chat_of(asked([IMAGE, own, IMAGE, TEXT], images=["first.png", "second.png"]))
    assert chat.images == ["first.png", "own.png", "second.png"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (asked([IMAGE, TEXT]), "more places for images"),
        (asked([IMAGE, TEXT], images=["a.png", "b.png"]), "has 2 images, and 1 more than places"),
        (asked("<image> <image>", images=["a.png"]), "more places for images"),
        (
            {"messages": [{"role": "assistant", "content": "yes"}], "images": ["a.png"]},
            "no message of the user",
        ),
    ],
)
def test_images_and_places_have_to_agree(record: Mapping[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        chat_of(record)


def test_an_image_is_a_path_a_data_uri_or_bytes(tmp_path: Path) -> None:
    write_chats(tmp_path)
    content = (tmp_path / "0.png").read_bytes()
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    given = ["0.png", {"url": "0.png"}, uri, {"url": uri}, {"bytes": content, "path": "gone.png"}]
    expected = np.asarray(ImageFile(tmp_path / "0.png").open())
    for each in given:
        file = read_image(each, tmp_path)
        assert file.size == (56, 40)
        assert (np.asarray(file.open()) == expected).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gone.png", "there is no such image; paths are relative to the directory"),
        ("chats.jsonl", "can't be read as an image"),
        ("https://example.org/a.png", "has to be a local file; download it first"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,?", "invalid base64"),
        (17, "has an image that is no path, found int"),
        ({"bytes": None}, "has an image that is no path, found NoneType"),
    ],
)
def test_what_is_no_image_is_refused_by_name(given: Any, message: str, tmp_path: Path) -> None:
    write_chats(tmp_path)
    with pytest.raises(BadRecord, match=message):
        _ = read_image(given, tmp_path).size


def test_a_damaged_image_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    write_chats(tmp_path)
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes((tmp_path / "0.png").read_bytes()[:500])
    assert ImageFile(damaged).size == (56, 40)
    with pytest.raises(BadRecord, match="can't be read as an image: image file is truncated"):
        ImageFile(damaged).open()


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.webp"])
def test_a_photo_is_turned_as_its_camera_was(name: str, tmp_path: Path) -> None:
    image = PIL_Image.new("RGB", (30, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / name, exif=exif)
    file = ImageFile(tmp_path / name)
    assert file.size == file.open().size == (20, 30)


# Tokens and positions.


def test_an_image_has_as_many_tokens_as_its_model_gives_it(model: Path, tmp_path: Path) -> None:
    examples = read(model, write_chats(tmp_path))
    assert examples.images is not None
    # 56 x 40 pixels are 7 x 5 merged patches of 8 x 8.
    assert [image.grid for image in examples.images.placed][:3] == [(1, 5, 7), (1, 3, 3), (1, 4, 8)]
    for image in examples.images.placed:
        tokens = examples.tokens[image.start : image.start + image.grid.tokens]
        assert (tokens == PAD).all()
        assert not examples.learned[image.start : image.start + image.grid.tokens].any()
    counted = sum(image.grid.tokens for image in examples.images.placed)
    assert (examples.tokens == PAD).sum() == counted
    assert examples.learned.sum() == 27


def test_a_record_of_a_table_may_hold_the_bytes_of_its_images(model: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_chats(tmp_path)
    content = (tmp_path / "0.png").read_bytes()
    record = asked("what is it?", images=[{"bytes": content, "path": None}])
    parquet.write_table(arrow.Table.from_pylist([record]), tmp_path / "table.parquet")
    (image,) = read(model, tmp_path / "table.parquet").images.placed  # type: ignore[union-attr]
    assert image.grid == (1, 5, 7)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr", "paddleocr_vl"]
)
def test_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    create(kind, tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).model
    # transformers takes images without a text between them for one.
    ids = torch.tensor([[1, 2, *[PAD] * 6, 3, *[PAD] * 4, 4, 5]])
    grids = [Grid(1, 2, 3), Grid(1, 4, 1)]
    before_merging = [(frames, 2 * rows, 2 * columns) for frames, rows, columns in grids]
    expected, _ = model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == PAD).int(),
        image_grid_thw=torch.tensor(before_merging),
    )
    found = positions_of(ids.shape[1], zip((2, 9), grids, strict=True))
    assert (expected[:, 0] == torch.from_numpy(found).T).all()


def test_pairs_rotate_by_axes_one_after_the_other_or_in_turns() -> None:
    rope = {"text_config": {"rope_parameters": {"mrope_section": [3, 2, 1]}}}
    plain = axes_of_pairs(Axes((1, 1, 1), interleaved=False), rope, 6)
    assert plain.tolist() == [0, 0, 0, 1, 1, 2]
    in_turns = axes_of_pairs(Axes((1, 1, 1), interleaved=True), rope, 6)
    assert in_turns.tolist() == [0, 1, 2, 0, 1, 0]
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
    assert axes_of_pairs(Axes((3, 2, 1), interleaved=False), old, 3).tolist() == [0, 1, 2]
    assert axes_of_pairs(Axes((1, 1, 1), interleaved=False), {}, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", range(4, 90))
def test_no_part_of_an_image_is_in_a_sample(length: int, model: Path, tmp_path: Path) -> None:
    """Examples that are too long end before an image that would be cut."""
    examples = read(model, write_chats(tmp_path))
    pieces = pieces_for(examples, length)
    if not len(pieces):
        return
    dataset, *_ = split_datasets(pieces, None, None, length, 1, (None, 0, 0))
    assert isinstance(dataset, ImageDataset)
    grids = [image.grid.tokens for image in examples.images.placed]  # type: ignore[union-attr]
    for index in range(len(dataset)):
        sample = dataset[index]
        numbers = [number for number in sample.images.tolist() if number != NO_IMAGE]
        assert (sample.tokens == PAD).sum() == sum(grids[number] for number in numbers)
        # Unused positions, and each example, begin at position 0.
        starts = np.flatnonzero(np.diff(sample.documents, prepend=-1))
        assert (sample.axes[starts] == 0).all()


# What is refused.


def test_an_image_for_a_model_of_text_is_refused_with_the_flag(model: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"chats.jsonl:1: has an image, .*--image-encoder"):
        read_examples([str(path)], HuggingFaceTokenizer(str(model)))


def test_a_field_of_images_without_places_is_not_read_by_a_model_of_text(
    model: Path, tmp_path: Path
) -> None:
    path = write_chats(tmp_path, [asked("hello", images=["0.png"])])
    examples = read_examples([str(path)], HuggingFaceTokenizer(str(model)))
    assert examples.unread == {"images": 1}


@pytest.mark.parametrize(
    "record",
    [
        asked("<|image_pad|>"),
        {"text": "a <|image_pad|>"},
        {"prompt": "a", "completion": "<|image_pad|>"},
    ],
)
def test_a_text_with_the_token_of_images_is_refused(
    record: Any, model: Path, tmp_path: Path
) -> None:
    path = write_chats(tmp_path, [record])
    with pytest.raises(
        CorruptCheckpoint, match=r"has 0 images, and its text, .* 1 token of images"
    ):
        read(model, path)


def test_an_image_that_changes_after_the_start_is_refused(model: Path, tmp_path: Path) -> None:
    write_chats(tmp_path)
    reader = ImageReader(model)
    number, image = reader.add(ImageFile(tmp_path / "0.png"), WORDS)
    assert reader.inputs(number)["image_grid_thw"].prod() == 4 * image.grid.tokens
    PIL_Image.new("RGB", (24, 24)).save(tmp_path / "0.png")
    with pytest.raises(CorruptCheckpoint, match="another size at the start of the run"):
        reader.inputs(number)


def test_images_of_a_prompt_without_messages_are_refused(model: Path, tmp_path: Path) -> None:
    record = {"prompt": "a", "completion": "b", "images": ["0.png"]}
    with pytest.raises(CorruptCheckpoint, match="has images, but no messages"):
        read(model, write_chats(tmp_path, [record]))


def test_a_model_of_another_kind_is_refused_with_those_that_are_trained(
    model: Path, tmp_path: Path
) -> None:
    write_chats(tmp_path)
    config = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mllama"}))
    reader = ImageReader(other)
    with pytest.raises(
        NotExpressible, match=r"images of 'mllama'; expected one of qwen2_vl, .*llava"
    ):
        reader.add(ImageFile(tmp_path / "0.png"), WORDS)


def test_a_missing_image_processor_is_named(model: Path, tmp_path: Path) -> None:
    write_chats(tmp_path)
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(UsageError, match="its image processor can't be made"):
        ImageReader(tmp_path).add(ImageFile(tmp_path / "0.png"), WORDS)


def test_a_config_without_the_token_of_images_is_named(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["image_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpoint, match="lacks image_token_id"):
        ImageReader(tmp_path)


def test_each_kind_has_a_name_of_its_own() -> None:
    names = [(name, kind.encoder) for kind in KINDS for name in kind.model_types]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("model_type", "text", "expected"),
    [
        ("gemma4", {}, Joint.NOWHERE),
        ("gemma4", {"use_bidirectional_attention": "vision"}, Joint.IN_WINDOWS),
        ("gemma4_unified", {}, Joint.IN_WINDOWS),
        ("gemma4_unified", {"use_bidirectional_attention": None}, Joint.NOWHERE),
    ],
)
def test_layers_in_which_images_attend_in_both_directions_follow_from_the_config(
    model_type: str, text: Mapping[str, Any], expected: Joint
) -> None:
    """transformers' class of the 12B has another default."""
    config = {"model_type": model_type, "text_config": text, "vision_config": {}}
    kind = kind_of(config)
    assert kind is not None
    assert kind.joint(config) is expected


# Chat templates.


def test_a_template_that_reads_parts_alone_gets_parts() -> None:
    parts_alone = (
        "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hello"}]
    assert with_parts(messages, parts_alone) == [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    ]
    for other in (TEMPLATE, "{{ messages[0]['content'] }}", "{{ raise_exception('no') }}"):
        assert with_parts(messages, other) == messages


def test_the_chats_of_these_tests_have_all_their_images() -> None:
    assert sum("image" in json.dumps(chat) for chat in chats()) == 4
