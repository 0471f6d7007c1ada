"""Rated answers to questions with images: the question keeps its images beside the answer to another question."""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.finetuning.examples import Examples
from megatron_lite.data.finetuning.image_dataset import READ_AT_ONCE, read_at_once
from megatron_lite.data.finetuning.pieces import rated_for
from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.trainer.data.image_answers import (
    PAD,
    TURNS,
    assert_whole_images,
    dataset_of,
    read_answers,
    said,
)
from tests.trainer.multimodal import create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")

TEXT = {"prompt": "a?", "completion": "b", "label": True}


def rated(answer: str, image: str, question: str = "<image>?") -> dict[str, Any]:
    return {
        "prompt": [said("user", question)],
        "completion": [said("assistant", answer)],
        "images": [image],
        "label": True,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create("qwen2_5_vl", directory)
    return directory


read = partial(read_answers, rated=True)


def answers(examples: Examples, model: Path) -> list[str]:
    """The learned texts."""
    tokenizer = HuggingFaceTokenizer(str(model))
    found = []
    for first, last in zip(examples.bounds[:-1], examples.bounds[1:], strict=True):
        learned = examples.tokens[first:last][examples.learned[first:last]]
        found.append(tokenizer.detokenize(learned.tolist()).removesuffix("<|im_end|>"))
    return found


def test_both_rows_have_the_images_of_the_question(model: Path, tmp_path: Path) -> None:
    records = [rated("a cat", "0.png"), TEXT, rated("a dog", "1.png", "what is<image>?")]
    examples = read(model, tmp_path, *records)
    assert examples.images is not None
    assert examples.images.numbers.tolist() == [0, 0, 1, 1]
    assert not examples.unread
    dataset = dataset_of(rated_for(examples, 96), 96)
    of_number = {int(number): dataset[place] for place, number in enumerate(dataset.order)}
    assert [of_number[n].images.tolist() for n in range(3)] == [[0, 0], [NO_IMAGE] * 2, [1, 1]]
    for number, image in ((0, 0), (2, 1)):
        sample = of_number[number]
        places = sample.tokens == PAD
        assert places.sum(1).tolist() == [examples.images.reader.tokens(image)] * 2
        assert (places[0] == places[1]).all()
        assert (sample.axes[0][places[0]] == sample.axes[1][places[1]]).all()
    assert read_at_once(dataset) == READ_AT_ONCE


def test_questions_with_other_images_are_other_questions(model: Path, tmp_path: Path) -> None:
    """The images have the same size, so that the tokens of the questions are the same."""
    write_chats(tmp_path)
    copy = base64.b64encode((tmp_path / "0.png").read_bytes()).decode()
    embedded = f"data:image/png;base64,{copy}"
    alike = [rated("1", "0.png"), rated("2", f"../{tmp_path.name}/0.png")]
    found = answers(read(model, tmp_path, *alike, rated("3", embedded)), model)
    assert found == ["1", "3", "2", "3", "3", "2"]
    with pytest.raises(CorruptCheckpoint, match="all questions are the same"):
        read(model, tmp_path, *alike)


def test_an_answer_keeps_its_own_images(model: Path, tmp_path: Path) -> None:
    drawn = {**rated("", "0.png"), "images": []}
    drawn["prompt"] = [said("user", "draw a cat")]
    drawn["completion"] = [said("assistant", [{"type": "image", "image": "1.png"}])]
    examples = read(model, tmp_path, rated("a cat", "0.png"), drawn)
    images = examples.images
    assert images is not None
    # The question with an image has the drawn image in the other answer. The question without one has neither.
    assert images.numbers.tolist() == [0, 0, 1, 1]
    assert [images.counts(*row).tolist() for row in rows_of(examples)] == [[1], [2], [1], [0]]
    for image in images.placed:
        span = examples.tokens[image.start : image.start + image.length]
        assert (span == PAD).all()
    assert not examples.learned[examples.tokens == PAD].any()


def rows_of(examples: Examples) -> list[tuple[Any, Any]]:
    """(start, end) of each row, as arrays of one element."""
    bounds = examples.bounds
    return [(bounds[n : n + 1], bounds[n + 1 : n + 2]) for n in range(len(examples))]


@pytest.mark.parametrize("length", range(4, 60))
def test_no_part_of_an_image_is_in_a_sample(length: int, model: Path, tmp_path: Path) -> None:
    long = {"messages": [*TURNS, TURNS[1]], "images": ["0.png", "1.png"], "label": False}
    examples = read(model, tmp_path, rated("a cat", "1.png"), long, TEXT)
    assert_whole_images(dataset_of(rated_for(examples, length), length))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**TEXT, "images": ["0.png"]}, "has images, but no messages where they could be"),
        ({**rated("a", "0.png"), "images": []}, "has <image> in a text, and no image for it"),
        ({**rated("a", "gone.png")}, "there is no such image"),
        ({**TEXT, "completion": "<|image_pad|>"}, "1 token of images"),
        ({**rated("a", "0.png"), "videos": ["a.mp4"]}, 'has "videos", which a run can\'t train on'),
    ],
)
def test_images_and_places_have_to_agree(
    record: Any, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        read(model, tmp_path, TEXT, record)
