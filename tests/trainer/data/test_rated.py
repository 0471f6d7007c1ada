"""Answers that are rated good or bad: every form of a record, the other answer to each question, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.finetuning.pieces import pieces_for, rated_for
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.data.finetuning.splits import split_datasets
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer, TokenizerOptions, build_tokenizer
from megatron_lite.objectives.examples import remarks
from tests.trainer.data.chat_templates import MARKED, save_tokenizer, without_marks
from tests.trainer.data.test_pairs import assistant, spelled, user

EOD = 100
NUMBERS = NullTokenizer(EOD)


def read(tmp_path: Path, records: list[Any], tokenizer: Tokenizer = NUMBERS) -> Examples:
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_examples([str(path)], tokenizer, ReadingOptions(rated=True))


def own(examples: Examples, tokenizer: Tokenizer = NUMBERS) -> list[tuple[str, str]]:
    return spelled(examples, tokenizer)[0::2]


def others(examples: Examples, tokenizer: Tokenizer = NUMBERS) -> list[tuple[str, str]]:
    return spelled(examples, tokenizer)[1::2]


def test_each_question_gets_the_answer_of_the_example_before(tmp_path: Path) -> None:
    records = [
        {"prompt": f"{n} 2", "completion": f"3 {n}", "label": n % 2 == 0, "id": n}
        for n in (7, 8, 9)
    ]
    examples = read(tmp_path, records)
    assert own(examples) == [("7 2", f"3 7 {EOD}"), ("8 2", f"3 8 {EOD}"), ("9 2", f"3 9 {EOD}")]
    assert others(examples) == [("7 2", f"3 9 {EOD}"), ("8 2", f"3 7 {EOD}"), ("9 2", f"3 8 {EOD}")]
    assert examples.good is not None
    assert examples.good.tolist() == [False, True, False]
    assert examples.unread == {"id": 3}


def test_another_answer_is_one_to_another_question(tmp_path: Path) -> None:
    asked = [(1, 3), (1, 4), (2, 5), (1, 6), (1, 7)]
    records = [{"prompt": f"{q}", "completion": f"{a}", "label": 1} for q, a in asked]
    found = [answer for _, answer in others(read(tmp_path, records))]
    assert found == [f"{answer} {EOD}" for answer in (5, 5, 4, 5, 5)]


def test_a_pair_is_a_good_and_a_bad_answer(tmp_path: Path) -> None:
    records = [
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {"prompt": "4", "completion": "5", "label": 0},
    ]
    examples = read(tmp_path, records)
    assert own(examples) == [("1", f"2 {EOD}"), ("1", f"3 {EOD}"), ("4", f"5 {EOD}")]
    assert [answer for _, answer in others(examples)] == [f"5 {EOD}", f"5 {EOD}", f"3 {EOD}"]
    assert examples.good is not None
    assert examples.good.tolist() == [True, False, False]


def test_pairs_are_read_as_dpo_reads_them(tmp_path: Path) -> None:
    """Their common beginning is the question, and equal answers are left out."""
    records = [
        {"chosen": "7 3 4", "rejected": "7 3 5"},
        {"prompt": "8", "chosen": "2", "rejected": "2"},
        {"prompt": "9", "completion": "6", "label": 1},
    ]
    examples = read(tmp_path, records)
    assert own(examples) == [("7 3", f"4 {EOD}"), ("7 3", f"5 {EOD}"), ("9", f"6 {EOD}")]
    assert examples.equal == 1
    assert examples.good is not None
    assert examples.good.tolist() == [True, False, True]


@pytest.mark.parametrize("marks", [True, False])
def test_of_a_chat_only_the_last_answer_is_rated(tmp_path: Path, marks: bool) -> None:
    template = MARKED["chatml"]
    save_tokenizer(tmp_path, template if marks else without_marks(template))
    tokenizer = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(tmp_path)))
    before = [user("hi"), assistant("hello"), user("more")]
    records = [
        {"messages": [*before, assistant("yes")], "label": True},
        {"prompt": before, "completion": [assistant("yes")], "label": True},
        {"prompt": before, "completion": "yes", "label": True},
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
                {"from": "human", "value": "more"},
                {"from": "gpt", "value": "yes"},
            ],
            "label": True,
        },
        {"messages": [user("other"), assistant("no")], "label": False},
        {"instruction": "other", "output": "no", "label": False},
    ]
    examples = read(tmp_path, records, tokenizer)
    first, *same, chat, alpaca = own(examples, tokenizer)
    assert same == [first] * 3
    assert chat == alpaca
    assert "yes" in first[1]
    assert "hello" in first[0]
    assert "hello" not in first[1]
    assert "no" in others(examples, tokenizer)[0][1]
    assert others(examples, tokenizer)[0][0] == first[0]


def test_all_messages_of_a_completion_are_rated(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, MARKED["chatml"])
    tokenizer = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(tmp_path)))
    answer = [assistant("hello"), user("more"), assistant("yes")]
    records = [
        {"prompt": [user("hi")], "completion": answer, "label": True},
        {"messages": [user("hi"), *answer], "label": True},
        {"messages": [user("other"), assistant("no")], "label": False},
    ]
    whole, last, _ = own(read(tmp_path, records, tokenizer), tokenizer)
    assert ("hello" in whole[1], "yes" in whole[1]) == (True, True)
    assert ("hello" in last[1], "yes" in last[1]) == (False, True)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "1", "completion": "2"}, 'has "prompt", "completion", but no "label"'),
        ({"prompt": "1", "completion": "2", "label": "good"}, "its \"label\" has to be true or false, found 'good'"),
        ({"prompt": "", "completion": "2", "label": True}, "has an answer without a question"),
        ({"text": "2", "label": True}, "has an answer without a question"),
        ({"messages": [assistant("1")], "label": True}, "has an answer without a question"),
        ({"prompt": "1", "chosen": "2"}, 'but no "rejected"'),
        ({"messages": [user("1")], "label": True}, "its last message is not the assistant's"),
        ({"prompt": "1", "completion": "2", "label": True, "text": "3"}, '"text", which would be left out'),
        ({"messages": [user("1"), assistant("2")], "label": True, "images": ["a.png"]}, "has images, and this run reads texts alone"),
        ("just text", "is plain text"),
    ],
)  # fmt: skip
def test_a_record_that_is_no_rated_answer_is_refused(
    tmp_path: Path, record: Any, reason: str
) -> None:
    good = {"prompt": "5", "completion": "6", "label": True}
    if isinstance(record, str):
        path = tmp_path / "rated.txt"
        path.write_text(record)
        with pytest.raises(CorruptCheckpoint, match=reason):
            read_examples([str(path)], NUMBERS, ReadingOptions(rated=True))
        return
    with pytest.raises(CorruptCheckpoint) as refused:
        read(tmp_path, [good, record])
    assert "rated.jsonl:2: " in str(refused.value)
    assert reason in str(refused.value)


def test_one_question_alone_is_refused(tmp_path: Path) -> None:
    records = [{"prompt": "1", "completion": f"{n}", "label": True} for n in range(3)]
    with pytest.raises(CorruptCheckpoint, match=r"rated\.jsonl: all questions are the same"):
        read(tmp_path, records)


def test_a_sample_is_an_answer_and_the_other_one_cut_to_the_length(tmp_path: Path) -> None:
    records = [
        {"prompt": "1 2", "completion": "3 4 5 6", "label": True},
        {"prompt": "7 8", "completion": "3 4 9", "label": False},
        {"prompt": "1 2 3 4 5 6", "completion": "7", "label": True},
    ]
    pieces = rated_for(read(tmp_path, records), 4)
    # Both answers to the first question begin alike, and the sample stays.
    assert (pieces.cut, pieces.dropped) == (2, 1)
    assert pieces.good is not None
    assert pieces.good.tolist() == [True, False]
    dataset = split_datasets(pieces, None, None, 4, 1, (2, 0, 0))[0]
    assert isinstance(dataset, PairDataset)
    sample = dataset[dataset.order.tolist().index(0)]
    assert sample.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 7, 0]]
    assert sample.labels.tolist() == [[2, 3, 4, 5], [2, 7, EOD, 0]]
    assert sample.loss_mask.tolist() == [[0, 1, 1, 1], [0, 1, 1, 0]]
    assert sample.good.tolist() == [1.0]
    shown = list(preview(sample, NUMBERS))
    assert shown[:2] == ["the first rated answer", "  good"]
    assert "  with the answer to another question" in shown


def test_a_random_file_pairs_each_question_with_an_answer_to_another_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    records = [
        {"prompt": f"{random.integers(3)}", "completion": f"{n}", "label": bool(random.integers(2))}
        for n in range(50)
    ]
    questions = {f"{record['completion']} {EOD}": record["prompt"] for record in records}
    for question, answer in others(read(tmp_path, records)):
        assert questions[answer] != question


def test_ratings_that_finetuning_does_not_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rated.jsonl"
    records = [
        {"prompt": "1", "completion": "2", "label": False},
        {"prompt": "1", "completion": "2", "label": "a word"},
        {"prompt": "1", "completion": "2"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    examples = read_examples([str(path)], NUMBERS)
    assert examples.ratings == 1
    lines = list(remarks(pieces_for(examples, 8), 8, "example", ""))
    assert any("--kto learns from ratings" in line for line in lines)
