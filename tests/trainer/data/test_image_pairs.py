"""Pairs of answers to questions with images: both rows have the same images, and no image is cut."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.image_dataset import READ_AT_ONCE, read_at_once
from megatron_lite.data.finetuning.pieces import pairs_for, scored_pairs_for, without_end
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.trainer.data.image_answers import (
    PAD,
    TURNS,
    assert_whole_images,
    dataset_of,
    read_answers,
    said,
)
from tests.trainer.multimodal import create, token

pytest.importorskip("PIL.Image", reason="needs pillow")

PAIR = {
    "prompt": [said("user", "<image>or<image>?")],
    "chosen": [said("assistant", "the first")],
    "rejected": [said("assistant", "both")],
    "images": ["0.png", "1.png"],
}
TEXTS = {"prompt": "a?", "chosen": "b", "rejected": "c"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create("qwen2_5_vl", directory)
    return directory


read = partial(read_answers, pairs=True)


def test_both_answers_have_the_same_images_which_are_read_once(model: Path, tmp_path: Path) -> None:
    examples = read(model, tmp_path, PAIR, TEXTS)
    assert examples.images is not None
    assert examples.images.numbers.tolist() == [0, 1, 0, 1]
    assert not examples.unread
    dataset = dataset_of(pairs_for(examples, 96), 96)
    of_number = {int(number): dataset[place] for place, number in enumerate(dataset.order)}
    assert of_number[0].images.tolist() == [0, 1, 0, 1]
    assert of_number[1].images.tolist() == [NO_IMAGE] * 4
    places = of_number[0].tokens == PAD
    expected = sum(examples.images.reader.tokens(number) for number in (0, 1))
    assert places.sum(1).tolist() == [expected] * 2
    # The rows are alike up to the answers.
    axes = of_number[0].axes
    assert axes.shape == (2, 96, 3)
    assert (axes[0][places[0]] == axes[1][places[1]]).all()
    # Without an image, a position counts the tokens.
    assert (of_number[1].axes == np.arange(96)[:, None]).all()
    assert read_at_once(dataset) == READ_AT_ONCE


@pytest.mark.parametrize("length", range(4, 90))
def test_no_part_of_an_image_is_in_a_sample(length: int, model: Path, tmp_path: Path) -> None:
    """Here the answers follow on questions in which images are."""
    long = {
        "chosen": [*TURNS, TURNS[1]],
        "rejected": [TURNS[0], said("assistant", "no"), TURNS[2], TURNS[1]],
        "images": ["0.png", "1.png"],
    }
    examples = read(model, tmp_path, PAIR, long, TEXTS)
    assert_whole_images(dataset_of(pairs_for(examples, length), length))


PADDING = token("<|endoftext|>")


@pytest.mark.parametrize("length", range(4, 90))
def test_no_part_of_an_image_is_in_a_text_that_gets_a_score(
    length: int, model: Path, tmp_path: Path
) -> None:
    """The model reads the last token too, behind which padding is left out."""
    padded = said("assistant", "no" + 3 * "<|endoftext|>")
    long = {
        "chosen": [*TURNS, TURNS[1]],
        "rejected": [TURNS[0], padded, TURNS[2], TURNS[1]],
        "images": ["0.png", "1.png"],
    }
    examples = without_end(read(model, tmp_path, PAIR, long, TEXTS, margins=True), PADDING)
    dataset = dataset_of(scored_pairs_for(examples, length, PADDING), length)
    assert dataset.images is not None
    reader = dataset.images.reader
    for index in range(len(dataset)):
        sample = dataset[index]
        numbers = [number for number in sample.images.tolist() if number != NO_IMAGE]
        whole = np.concatenate((sample.tokens[:, :1], sample.labels[:, :-1]), 1)
        whole[np.arange(length) >= sample.lengths[:, None]] = 0
        assert (whole == PAD).sum() == sum(map(reader.tokens, numbers))
        # Behind an image, the position of the last token isn't its place.
        for row, count in enumerate(sample.lengths):
            end = whole[row, :count]
            if (end == PAD).any() and end[-1] != PAD:
                assert (sample.axes[row, count - 1] < count - 1).all()


def test_images_stay_at_their_places_when_padding_is_left_out(model: Path, tmp_path: Path) -> None:
    examples = read(model, tmp_path, PAIR, {**PAIR, "images": ["2.png", "3.png"]})
    shorter = without_end(examples, int(examples.tokens[-1]))
    assert len(shorter.tokens) == len(examples.tokens) - 4
    assert shorter.images is not None
    for image in shorter.images.placed:
        span = shorter.tokens[image.start : image.start + image.length]
        assert (span == PAD).all()


def test_images_that_are_in_no_sample_are_counted_once(model: Path, tmp_path: Path) -> None:
    examples = read(model, tmp_path, PAIR, {**PAIR, "images": ["2.png", "3.png"]})
    images = examples.images
    assert images is not None
    starts = examples.bounds[:-1]
    ends = examples.bounds[1:] - 1  # the last token is a label alone
    assert images.outside(starts, ends) == 0
    assert images.outside(starts[:2], ends[:2]) == 2
    assert images.outside(starts[:0], ends[:0]) == 4


def test_answers_may_have_images_of_their_own(model: Path, tmp_path: Path) -> None:
    picture = [{"type": "image", "image": "0.png"}]
    other = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "!"}]
    record = {
        "prompt": [said("user", "draw a cat")],
        "chosen": [said("assistant", picture)],
        "rejected": [said("assistant", other)],
    }
    examples = read(model, tmp_path, record)
    assert examples.images is not None
    assert examples.images.numbers.tolist() == [0, 1]
    assert not examples.learned[examples.tokens == PAD].any()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**TEXTS, "images": ["0.png"]}, "has images, but no messages where they could be"),
        ({**PAIR, "images": ["0.png"]}, "has more places for images in its messages than images"),
        ({**PAIR, "images": ["0.png"] * 3}, "has 3 images, and 1 more than places"),
        ({**PAIR, "images": ["0.png", "gone.png"]}, "there is no such image"),
        ({**TEXTS, "chosen": "<|image_pad|>"}, "1 token of images"),
        ({**PAIR, "videos": ["a.mp4"]}, 'has "videos", which a run can\'t train on'),
    ],
)
def test_images_and_places_have_to_agree(
    record: Any, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        read(model, tmp_path, record)


def test_an_equal_pair_is_left_out_with_its_images(model: Path, tmp_path: Path) -> None:
    equal = {**PAIR, "rejected": PAIR["chosen"]}
    examples = read(model, tmp_path, equal, PAIR)
    assert examples.equal == 1
    assert examples.images is not None
    assert examples.images.numbers.tolist() == [2, 3, 2, 3]


def test_the_hash_of_images_knows_their_contents_and_not_their_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = identity_of(read(model, tmp_path, PAIR, TEXTS))
    reader = ImageReader(model)
    options = ReadingOptions(pairs=True, images=reader)
    tokenizer = HuggingFaceTokenizer(str(model))
    for _ in range(2):  # the second reading gives other numbers
        again = read_examples([str(tmp_path / "answers.jsonl")], tokenizer, options)
    assert again.images is not None
    assert again.images.numbers.tolist() == [2, 3, 2, 3]
    reads: list[int] = []
    hashed = ImageReader.hashed
    monkeypatch.setattr(
        ImageReader, "hashed", lambda self, number: (reads.append(number), hashed(self, number))[1]
    )
    assert identity_of(again) == identity_of(again) == found
    assert reads == [2, 3]
    assert identity_of(read(model, tmp_path, {**PAIR, "images": ["0.png", "2.png"]})) != found


def identity_of(examples: Examples) -> str:
    assert examples.images is not None
    return examples.images.identity


def test_the_header_of_an_image_is_read_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    size = ImageFile.size.fget
    assert size is not None
    monkeypatch.setattr(
        ImageFile, "size", property(lambda file: (opened.append(str(file)), size(file))[1])
    )
    read(model, tmp_path, PAIR)
    assert [Path(name).name for name in opened] == ["0.png", "1.png"]
