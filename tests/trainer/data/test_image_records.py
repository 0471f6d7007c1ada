"""Records whose images or videos would be left out are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.examples import ReadingOptions, read_examples
from megatron_lite.data.finetuning.forms import Chat, read_record
from megatron_lite.data.finetuning.record_images import with_images
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.objectives.prompts import read_prompts
from tests.trainer.multimodal import tokenizer

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "a cat?"}


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "yes"}
    return {"messages": [{"role": "user", "content": content}, answer], **fields}


def chat_of(record: Any) -> Chat:
    example = read_record(record).example
    assert isinstance(example, Chat)
    return with_images(example, record)


@pytest.mark.parametrize("fields", [{}, {"images": []}, {"images": None}, {"image_path": "a.png"}])
def test_the_place_of_an_image_without_an_image_is_refused(fields: dict[str, Any]) -> None:
    """The run would learn an answer about an image that the model doesn't see."""
    with pytest.raises(BadRecord, match="has <image> in a text, and no image for it"):
        chat_of(asked("<image>a cat?", **fields))


def test_a_place_beside_a_part_that_is_an_image_is_refused() -> None:
    own = {"type": "image", "image": "a.png"}
    with pytest.raises(BadRecord, match="has <image> in a text, and no image for it"):
        chat_of(asked([own, {"type": "text", "text": "<image>a cat?"}]))


def test_an_answer_may_be_about_the_place_of_an_image() -> None:
    messages = [{"role": "user", "content": "a tag?"}, {"role": "assistant", "content": "<image>"}]
    assert chat_of({"messages": messages}).messages == messages


def test_one_of_both_fields_of_images_may_be_empty() -> None:
    for empty in ([], None, ""):
        assert chat_of(asked("<image>a cat?", images=empty, image="a.png")).images == ["a.png"]
    assert not chat_of(asked("a cat?", image="")).images
    with pytest.raises(BadRecord, match='has "images" and "image"; expected one of them'):
        chat_of(asked("<image>a cat?", images=["a.png"], image="b.png"))


@pytest.mark.parametrize("name", ["videos", "video", "audios", "audio"])
def test_a_field_of_videos_or_sounds_is_refused(name: str) -> None:
    with pytest.raises(BadRecord, match=f'has "{name}", which a run can\'t train on'):
        chat_of(asked("a cat?", **{name: ["a.mp4"]}))
    assert chat_of(asked("a cat?", **{name: []})).images == []


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels", "resized_height", "resized_width"])
def test_the_limits_of_a_single_image_are_refused(name: str) -> None:
    image = {"type": "image", "image": "a.png"}
    with pytest.raises(BadRecord, match=f'an image with its own "{name}", which is not read'):
        chat_of(asked([{**image, name: 3136}, TEXT]))
    assert chat_of(asked([{**image, name: None}, TEXT])).images == ["a.png"]


def test_an_image_in_an_unknown_form_is_refused_with_the_known_forms() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    with pytest.raises(BadRecord, match='a part without "image", "image_url", "path" or "url"'):
        chat_of(asked([{**IMAGE, "source": source}, TEXT]))
    with pytest.raises(BadRecord, match="content that is not text or an image"):
        chat_of(asked([{"type": "video", "video": "a.mp4"}, TEXT]))


@pytest.mark.oracle
def test_images_are_refused_where_texts_alone_are_learned(tmp_path: Path) -> None:
    """The places of the images would be learned as texts."""
    tokenizer().save_pretrained(tmp_path)
    made = HuggingFaceTokenizer(str(tmp_path))
    path = tmp_path / "data.jsonl"

    def refused(record: Any, read: Callable[[], object]) -> str:
        path.write_text(json.dumps(record))
        with pytest.raises(CorruptCheckpoint) as caught:
            read()
        return str(caught.value)

    def read_with(options: ReadingOptions) -> Callable[[], object]:
        return lambda: read_examples([str(path)], made, options)

    question = [{"role": "user", "content": "<image>a cat?"}]
    assert "has an image, and the model of this run reads text alone" in refused(
        asked("<image>a cat?", images=["a.png"]), read_with(ReadingOptions())
    )
    pair = {"prompt": "a?", "chosen": "b", "rejected": "c", "images": ["a.png"]}
    assert "this run reads texts alone; it reads images too" in refused(
        pair, read_with(ReadingOptions(pairs=True))
    )
    assert "the model of this run reads text alone" in refused(
        {"prompt": question, "images": ["a.png"]},
        lambda: read_prompts([str(path)], made, None, "--finetune-data"),
    )
