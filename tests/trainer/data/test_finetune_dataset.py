"""Examples for finetuning: packed whole, learned where they should be, in an order that depends on nothing but the seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import CorruptCheckpoint
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.finetune_dataset import Examples, FinetuneDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import NullTokenizer

EOD = 100


def build(tmp_path: Path, records: list[Any], samples: int | None = None, **options: Any) -> list[Dataset | None]:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = DataOptions(**({"seq_length": 8, "finetune_data": [str(path)]} | options))
    return build_datasets(given, NullTokenizer(EOD), (samples, samples, samples))


def test_the_completion_and_the_end_are_learned_and_the_prompt_is_not(tmp_path: Path) -> None:
    dataset = build(tmp_path, [{"prompt": "1 2 3", "completion": "4 5"}])[0]
    assert dataset is not None
    sample = dataset[0]
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert sample.labels.tolist() == [2, 3, 4, 5, EOD, 0, 0, 0]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert sample.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert sample.documents.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_of_a_text_all_is_learned(tmp_path: Path) -> None:
    dataset = build(tmp_path, [{"text": "1 2"}, {"input": "3", "output": "4"}], seed=3)[0]
    assert dataset is not None
    first, second = sorted(zip(dataset[0].tokens[:4].tolist(), dataset[0].loss_mask[:4].tolist(), strict=True))[:2]
    assert (first, second) == ((1, 1.0), (2, 1.0))
    assert dict(zip(dataset[0].tokens.tolist(), dataset[0].loss_mask.tolist(), strict=True))[3] == 1.0  # predicts 4


@given(
    st.lists(st.integers(2, 14), min_size=1, max_size=25),
    st.integers(1, 12),
    st.none() | st.integers(1, 40),
    st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_every_example_is_drawn_once_an_epoch_and_whole(
    sizes: list[int], seq_length: int, samples: int | None, seed: int
) -> None:
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    tokens = np.concatenate([np.full(size, number + 1) for number, size in enumerate(sizes)]).astype(np.int32)
    examples = Examples(tokens, np.ones(len(tokens), bool), bounds)
    dataset = FinetuneDataset(examples, np.arange(len(sizes), dtype=np.int32), seq_length, samples, seed)
    assert samples is None or len(dataset) >= samples
    drawn = np.zeros(len(sizes) + 1, int)
    for number in range(len(dataset)):
        sample = dataset[number]
        for document in np.unique(sample.documents):
            inside = sample.documents == document
            kinds = set(sample.tokens[inside].tolist())
            assert len(kinds) == 1, "two examples see each other"
            assert sample.position_ids[inside].tolist() == list(range(inside.sum()))
            if (kind := kinds.pop()) > 0:
                assert inside.sum() == min(sizes[kind - 1] - 1, seq_length)
                drawn[kind] += 1
            else:
                assert not sample.loss_mask[inside].any()
    epochs = drawn[1]
    assert drawn[1:].tolist() == [epochs] * len(sizes)
    assert epochs == 1 or samples is not None
    again = FinetuneDataset(examples, np.arange(len(sizes), dtype=np.int32), seq_length, samples, seed)
    assert all(np.array_equal(dataset[number].tokens, again[number].tokens) for number in range(len(dataset)))


def test_parts_for_evaluation(tmp_path: Path) -> None:
    records = [{"text": f"{number} {number}"} for number in range(20)]
    assert [found is None for found in build(tmp_path, records, 5)] == [False, True, True]
    train, valid, test = build(tmp_path, records, 30, split="8,2,0")
    assert test is None
    assert train is not None
    assert valid is not None
    seen = [{int(token) for number in range(30) for token in each[number].tokens[:1]} for each in (train, valid)]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "1"}, 'has neither "text" nor "prompt" and "completion"'),
        ({"text": 1}, "has neither"),
        ([], "not a JSON object"),
        ({"text": "one"}, "invalid literal"),
        ({"text": ""}, "invalid literal"),
    ],
    ids=str,
)
def test_what_is_no_example_is_reported_with_its_line(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=rf"examples\.jsonl:2: .*{words}"):
        build(tmp_path, [{"text": "1"}, record])


def test_a_file_without_examples_is_told(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no examples"):
        build(tmp_path, [])
