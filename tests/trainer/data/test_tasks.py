"""Data of Megatron's tasks: what is read of their files, what is refused by file and line, and the samples that are made."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.tasks.dataset import TaskDataset, epoch_samples, in_order, shuffled
from megatron_lite.data.tasks.examples import Example, Task, clean
from megatron_lite.data.tasks.glue import MNLI, QQP, read_mnli, read_qqp
from megatron_lite.data.tasks.race import RACE, read_race
from megatron_lite.data.tasks.samples import Sequences, TaskSample
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from tests.trainer.data.vocabularies import bert_vocabulary


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def columns(count: int, **values: str) -> str:
    """A line of so many columns; values: by `c` and their number."""
    return "\t".join(values.get(f"c{number}", "-") for number in range(count))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two  spaces,\n a line\tand a tab", "two spaces, a line and a tab"),
        ("it ends . and goes on", "it ends. and goes on"),
        ("dots . . . . .", "dots. ... ."),
        (" . a . b", ". a. b"),
        ("none .", "none ."),
    ],
)
def test_texts_are_cleaned_as_megatron_cleans_them(text: str, expected: str) -> None:
    """White space to one space, then ` . ` to `. `, three times over."""
    assert clean(text) == expected


def test_mnli_has_its_sentences_in_columns_8_and_9_and_its_label_last(tmp_path: Path) -> None:
    train = [columns(12)] + [
        columns(
            12, c0=str(number), c8=f" A fox  {number} . ", c9="The dog", c10="neutral", c11=label
        )
        for number, label in enumerate(("contradiction", "entailment", "neutral"))
    ]
    found = read_mnli(write(tmp_path / "train.tsv", train)).examples
    assert found == [Example((f"A fox {number} .",), "The dog", number) for number in range(3)]
    development = [columns(16), columns(16, c0="7", c8="a", c9="b", c15="neutral")]
    assert read_mnli(write(tmp_path / "dev.tsv", development)).examples == [Example(("a",), "b", 2)]
    test = [columns(10), columns(10, c0="7", c8="a", c9="b")]
    assert read_mnli(write(tmp_path / "test.tsv", test)).examples == [Example(("a",), "b", 0)]


def test_qqp_has_its_questions_in_columns_3_and_4_and_broken_lines_are_left_out(
    tmp_path: Path,
) -> None:
    lines = [
        columns(6),
        columns(6, c0="0", c3="a", c4="b", c5="1"),
        "broken",
        columns(6, c0="2", c3=" ", c4="b", c5="0"),
    ]
    found = read_qqp(write(tmp_path / "train.tsv", lines))
    assert found.examples == [Example(("a",), "b", 1)]
    assert found.left_out == [
        f"{tmp_path}/train.tsv:3: has 1 of 6 columns",
        f"{tmp_path}/train.tsv:4: an empty question",
    ]
    test = [columns(3), columns(3, c0="0", c1="a", c2="b")]
    assert read_qqp(write(tmp_path / "test.tsv", test)).examples == [Example(("a",), "b", 0)]


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        (MNLI, [], "is empty; the first line of MNLI's files names the columns"),
        (
            MNLI,
            ["a\tb"],
            ":1: the first line names 2 columns, separated by tabs; MNLI has 10 or more",
        ),
        (MNLI, [columns(12), "0\ta"], ":2: has 2 columns, MNLI has 10 or more"),
        (
            MNLI,
            [columns(12), columns(12, c0="x")],
            ":2: the first column should number the line, found 'x'",
        ),
        (MNLI, [columns(12), columns(12, c0="1", c8=" ")], ":2: the text in column 9 is empty"),
        (
            MNLI,
            [columns(12), columns(12, c0="1", c11="maybe")],
            ":2: the label in the last column is 'maybe'; expected contra",
        ),
        (
            QQP,
            ["a\tb"],
            ":1: the first line names 2 columns, separated by tabs; QQP has 6, and 3 in a test set",
        ),
        (
            QQP,
            [columns(6), columns(6, c0="1", c5="2")],
            ":2: the label in column 6 is '2'; expected 0 or 1",
        ),
        (QQP, [columns(3), columns(6, c0="1")], ":2: has 6 columns, a test set of QQP has 3"),
    ],
)
def test_a_line_that_is_wrong_is_refused_by_file_and_line(
    tmp_path: Path, task: Task, lines: list[str], message: str
) -> None:
    path = write(tmp_path / "train.tsv", lines)
    with pytest.raises(CorruptCheckpoint) as caught:
        task.read(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_a_file_that_is_no_text_is_refused_by_about_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes(b"a\tb\n\xff\xfe\n")
    with pytest.raises(CorruptCheckpoint, match=r"train\.tsv: is not text in UTF-8"):
        read_mnli(str(tmp_path / "train.tsv"))


DOCUMENT: dict[str, Any] = {
    "article": "The fox  runs . It sleeps .", "questions": ["What does the _ do?", "Who sleeps?"],
    "options": [["fox", "dog", "cat", "cow"], ["a", "b", "c", "d"]], "answers": ["B", "D"], "id": "high1.txt",
}  # fmt: skip


def test_race_fills_blanks_with_options_or_puts_them_behind_the_question(tmp_path: Path) -> None:
    write(tmp_path / "2.txt", [json.dumps(DOCUMENT | {"article": "second"})])
    write(tmp_path / "10.txt", [json.dumps(DOCUMENT)])
    write(tmp_path / "notes.md", ["no part of it"])
    found = read_race(str(tmp_path)).examples
    assert found[0] == Example(
        tuple(f"What does the {option} do?" for option in ("fox", "dog", "cat", "cow")),
        "The fox runs. It sleeps .",
        1,
    )
    assert found[1] == Example(
        tuple(f"Who sleeps? {option}" for option in "abcd"), "The fox runs. It sleeps .", 3
    )
    assert [example.second for example in found[2:]] == ["second", "second"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, ":2: is not JSON"),
        ({"article": 3}, ":2: should have a text `article`, found 3"),
        ({"options": None}, ":2: should have a list of options, found None"),
        (
            {"answers": ["A"]},
            ":2: should have as many questions as options and answers, found {'questions': 2,",
        ),
        ({"answers": ["A", "E"]}, ":2: question 2: should have an answer from A to D, found 'E'"),
        (
            {"options": [["a"] * 4, ["a"] * 3]},
            ":2: question 2: should have 4 options, found ['a', 'a', 'a']",
        ),
        ({"questions": [1, "b"]}, ":2: question 1: should be a text, found 1"),
    ],
)
def test_a_document_of_race_that_is_wrong_is_refused_by_file_and_line(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    path = write(
        tmp_path / "1.txt",
        [json.dumps(DOCUMENT), "{" if change is None else json.dumps(DOCUMENT | change)],
    )
    with pytest.raises(CorruptCheckpoint) as caught:
        read_race(str(tmp_path))
    assert str(caught.value).startswith(path + message)


def test_a_directory_without_race_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \*\.txt; RACE comes as directories of them"):
        read_race(str(tmp_path))


def sequences(directory: Path, task: Task, length: int) -> Sequences:
    tokenizer = build_tokenizer(
        TokenizerOptions("BertWordPieceLowerCase", vocab_file=bert_vocabulary(directory))
    )
    words = vocabulary(tokenizer, ("cls", "sep", "pad"))
    return Sequences(task, tokenizer.tokenize, words.cls, words.sep, words.pad, length)


@pytest.mark.oracle
def test_samples_are_those_of_transformers_tokenizer_which_cuts_the_second_text(
    tmp_path: Path,
) -> None:
    from transformers import BertTokenizer

    made = sequences(tmp_path / "bert", MNLI, 24)
    theirs = BertTokenizer(str(tmp_path / "bert" / "vocab.txt"))
    for first, second in (
        ("the quick fox", "a lazy dog does"),
        ("the dog", "naïve café, 北京 " * 4),
        ("a b c", "x y z " * 5),
    ):
        found = made.sample(Example((first,), second, 1))
        expected = theirs(
            first, second, truncation="only_second", max_length=24, padding="max_length"
        )
        assert found.text.tolist() == expected["input_ids"]
        assert found.padding_mask.tolist() == expected["attention_mask"]
        assert found.types.tolist() == expected["token_type_ids"]
        assert (found.label, found.counts) == (1, 1)


def test_a_first_text_that_is_too_long_leaves_nothing_of_the_second_and_ends_with_sep(
    tmp_path: Path,
) -> None:
    made = sequences(tmp_path / "bert", MNLI, 6)
    the, cls, sep = made.tokenize("the")[0], made.cls, made.sep
    assert made.sample(Example(("the " * 9,), "dog", 0)).text.tolist() == [
        cls,
        the,
        the,
        the,
        the,
        sep,
    ]
    assert made.sample(Example(("the " * 9,), "dog", 0)).types.tolist() == [0, 0, 0, 0, 0, 1]
    assert made.sample(Example(("the " * 4,), "dog", 0)).text.tolist() == [
        cls,
        the,
        the,
        the,
        the,
        sep,
    ]
    assert made.sample(Example(("the",), "dog", 0)).text.tolist() == [
        cls,
        the,
        sep,
        made.tokenize("dog")[0],
        sep,
        made.pad,
    ]


def test_a_question_of_race_has_four_rows_with_at_most_128_tokens_before_the_article(
    tmp_path: Path,
) -> None:
    made = sequences(tmp_path / "bert", RACE, 160)
    found: TaskSample = made.sample(Example(("fox",) * 3 + ("the " * 200,), "dog " * 200, 2))
    assert found.text.shape == found.types.shape == found.padding_mask.shape == (4, 160)
    assert found.text[3, 129] == made.sep
    assert (found.types[3] == 0).sum() == 130
    assert (found.types[0] == 0).sum() == 3
    assert (found.text[:, -1] == made.sep).all()


def test_epochs_are_shuffled_as_torchs_distributed_sampler_shuffles_them() -> None:
    from torch.utils.data.distributed import DistributedSampler

    order = shuffled(10, 4, 3, 1234, keep_last=False).reshape(3, 8)
    sampler: Any = DistributedSampler(range(10), num_replicas=1, rank=0)  # type: ignore[arg-type]
    for epoch in range(3):
        sampler.set_epoch(1234 + epoch)
        assert order[epoch].tolist() == list(sampler)[:8]


def test_a_last_batch_is_dropped_or_filled_with_what_does_not_count(tmp_path: Path) -> None:
    assert [epoch_samples(10, 4, keep_last=keep) for keep in (False, True)] == [8, 12]
    order = shuffled(10, 4, 2, 1, keep_last=True).reshape(2, 12)
    assert sorted(order[0][order[0] >= 0].tolist()) == list(range(10))
    made = sequences(tmp_path / "bert", QQP, 8)
    dataset = TaskDataset(
        [Example(("the",), "fox", number % 2) for number in range(3)], made, np.empty(0, np.int64)
    )
    found = [
        dataset[number] for dataset in [in_order(dataset, 8)] for number in range(len(dataset))
    ]
    assert [sample.label for sample in found if sample.counts] == [0, 1, 0]
    assert len(found) == 8
