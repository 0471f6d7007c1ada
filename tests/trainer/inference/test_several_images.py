"""Models that read one of several images otherwise than a single one: LLaVA-OneVision cuts no tiles of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.inference.chat_prompts import encode_prompt, read_chat
from megatron_lite.inference.conversation import Conversation
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.image_parts import with_pictures
from megatron_lite.objectives.prompts import read_prompts
from tests.trainer.inference.test_images import opened_model
from tests.trainer.multimodal import create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

SMALL = 17
"""Tokens of one of several images: 4 x 4 patches and the end of a row."""


class Model(NamedTuple):
    opened: Opened
    directory: Path

    @property
    def images(self) -> list[Path]:
        return [self.directory / "data" / f"{number}.png" for number in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("onevision")
    create("llava_onevision", directory / "hf")
    write_chats(directory / "data")
    return Model(opened_model(directory / "hf"), directory)


def tokens(pictures: Any) -> list[int]:
    return [picture.written.grid.tokens for picture in pictures]


def asked(paths: list[Path]) -> list[Any]:
    parts = [{"type": "image", "image": str(path)} for path in paths]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def test_a_conversation_reads_its_first_image_again_when_a_second_one_comes(model: Model) -> None:
    first, second = model.images
    talk = Conversation(model.opened.images, [])
    talk.hear(f"/image {first}")
    assert talk.hear("what is it?")
    (alone,) = tokens(talk.pictures)
    assert alone > SMALL
    talk.answered("a cat")
    talk.hear(f"/image {second}")
    assert talk.hear("and this?")
    assert tokens(talk.pictures) == [SMALL, SMALL]
    talk.unanswered()
    assert talk.hear("what is it?")
    assert tokens(talk.pictures) == [alone]


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_request_reads_its_images_by_their_number(model: Model, is_counted: bool) -> None:
    images = model.opened.images.measuring() if is_counted else model.opened.images

    def read(paths: list[Path]) -> list[int]:
        messages = asked(paths)
        for part in messages[0]["content"][:-1]:
            part["image"] = ImageFile(Path(part["image"]).read_bytes())
        return tokens(with_pictures(messages, images)[1])

    assert read(model.images) == [SMALL, SMALL]
    assert read(model.images[:1])[0] > SMALL


def test_generate_reads_the_images_of_a_chat_by_their_number(model: Model) -> None:
    def read(paths: list[Path]) -> list[int]:
        prompt = read_chat({"messages": asked(paths)}, model.directory / "chats.jsonl", 1)
        return tokens(encode_prompt(prompt, model.opened.tokenizer, model.opened.images)[1])

    assert read(model.images) == [SMALL, SMALL]
    assert read(model.images[:1])[0] > SMALL


def test_prompts_with_rewards_read_images_by_their_number(model: Model, tmp_path: Path) -> None:
    records = [{"prompt": asked(paths)} for paths in (model.images, model.images[:1])]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    reader = ImageReader(model.directory / "hf")
    both, one = read_prompts([str(path)], model.opened.tokenizer, None, "--finetune-data", reader)
    assert tokens(both.pictures) == [SMALL, SMALL]
    assert tokens(one.pictures)[0] > SMALL
    # The pixels are those that the tokens stand for.
    assert [len(reader.inputs(number)["pixel_values"][0]) for number in range(2)] == [1, 1]
    assert len(reader.inputs(2)["pixel_values"][0]) > 1
