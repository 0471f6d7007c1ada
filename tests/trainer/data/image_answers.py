"""Pairs and rated answers with images: their records, the reading of them, and the check that no image is cut."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.pair_dataset import PairDataset, pair_dataset
from megatron_lite.data.finetuning.pieces import PairPieces
from megatron_lite.data.images.places import NO_IMAGE
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.trainer.multimodal import token, write_chats

PAD = token("<|image_pad|>")


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TURNS = [said("user", "<image>?"), said("assistant", "yes"), said("user", "<image>?")]
"""Two questions with an image each, of which the second has no answer."""


def read_answers(model: Path, directory: Path, *records: Any, **kind: bool) -> Examples:
    """kind: `pairs` or `rated` of ReadingOptions."""
    write_chats(directory)
    path = directory / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    options = ReadingOptions(images=ImageReader(model), **kind)
    return read_examples([str(path)], HuggingFaceTokenizer(str(model)), options)


def dataset_of(pieces: PairPieces, length: int) -> PairDataset:
    return pair_dataset(pieces, np.arange(len(pieces)), length, None, seed=1)


def assert_whole_images(dataset: PairDataset) -> None:
    """No sample has a part of an image."""
    assert dataset.images is not None
    reader = dataset.images.reader
    for index in range(len(dataset)):
        sample = dataset[index]
        numbers = [number for number in sample.images.tolist() if number != NO_IMAGE]
        tokens = sum(reader.tokens(number) for number in numbers)
        assert (sample.tokens == PAD).sum() == tokens
