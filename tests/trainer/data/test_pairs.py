"""Pairs of answers: every form that data sets have them in, what of them is compared, what is refused with line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.finetuning.pieces import pairs_for
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.data.finetuning.splits import split_datasets
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer, TokenizerOptions, build_tokenizer
from tests.trainer.data.chat_templates import (
    LAST_ANSWER_THINKS,
    MARKED,
    QWEN3,
    save_tokenizer,
    without_marks,
)

EOD = 100
NUMBERS = NullTokenizer(EOD)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(
    tmp_path: Path, records: list[Any], tokenizer: Tokenizer = NUMBERS, *, margins: bool = False
) -> Examples:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_examples([str(path)], tokenizer, ReadingOptions(pairs=True, margins=margins))


def spelled(examples: Examples, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """(what is given, what is compared) of each answer."""
    found = []
    for first, last in zip(examples.bounds[:-1], examples.bounds[1:], strict=True):
        tokens, learned = examples.tokens[first:last], examples.learned[first:last]
        found.append(
            (
                tokenizer.spelled(tokens[~learned].tolist()),
                tokenizer.spelled(tokens[learned].tolist()),
            )
        )
    return found


def test_texts_with_a_prompt_and_texts_that_begin_alike_are_given_the_same_beginning(
    tmp_path: Path,
) -> None:
    records = [
        {"prompt": "1 2", "chosen": "3 4", "rejected": "3 5 6"},
        {"chosen": "1 2 3 4", "rejected": "1 2 5"},
    ]
    examples = read(tmp_path, records)
    assert examples.tokens.tolist() == [
        1,
        2,
        3,
        4,
        EOD,
        1,
        2,
        3,
        5,
        6,
        EOD,
        1,
        2,
        3,
        4,
        EOD,
        1,
        2,
        5,
        EOD,
    ]
    assert examples.learned.astype(int).tolist() == [
        0,
        0,
        1,
        1,
        1,
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        0,
        1,
        1,
        1,
        0,
        0,
        1,
        1,
    ]


ASKED = [user("1?"), assistant("one"), user("2?")]
CHATS = {
    "prompt of messages": {"prompt": ASKED, "chosen": [assistant("two")], "rejected": [assistant("three")]},
    "conversations that begin alike": {"chosen": [*ASKED, assistant("two")], "rejected": [*ASKED, assistant("three")]},
    "beside a prompt that is one of their messages": {
        "prompt": "1?", "chosen": [*ASKED, assistant("two")], "rejected": [*ASKED, assistant("three")],
        "messages": [*ASKED, assistant("two")], "score_chosen": 7.0,
    },
    "answers as text": {"prompt": ASKED, "chosen": "two", "rejected": "three"},
    "a message each": {
        "conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "one"}, {"from": "human", "value": "2?"}],
        "chosen": {"from": "gpt", "value": "two"}, "rejected": {"from": "gpt", "value": "three"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "template", [MARKED["chatml"], without_marks(MARKED["chatml"])], ids=["marked", "unmarked"]
)
@pytest.mark.parametrize("form", CHATS)
def test_only_the_last_answer_of_a_conversation_is_compared(
    form: str, template: str, tmp_path: Path
) -> None:
    tokenizer = chatty(tmp_path, template)
    examples = read(tmp_path, [CHATS[form]], tokenizer)
    (given, chosen), (same, rejected) = spelled(examples, tokenizer)
    assert chosen.strip() == "two<|im_end|>"
    assert rejected.strip() == "three<|im_end|>"
    assert given.strip() == same.strip()
    assert "one<|im_end|>" in given


THOUGHT = [user("1?"), assistant("<think>\nthree minus two\n</think>\n\none"), user("2?")]


@pytest.mark.parametrize("template", [QWEN3, without_marks(QWEN3)], ids=["marked", "unmarked"])
def test_thinking_that_is_removed_from_earlier_answers_shifts_nothing(
    template: str, tmp_path: Path
) -> None:
    """Qwen 3's rule: what stands before the last question is the same, whatever the answer to it is."""
    tokenizer = chatty(tmp_path, template)
    record = {
        "prompt": THOUGHT,
        "chosen": [assistant("<think>\none and one\n</think>\n\ntwo")],
        "rejected": [assistant("three")],
    }
    (given, chosen), (same, rejected) = spelled(read(tmp_path, [record], tokenizer), tokenizer)
    assert chosen.strip() == "<think>\none and one\n</think>\n\ntwo<|im_end|>"
    assert rejected.strip() == "<think>\n\n</think>\n\nthree<|im_end|>"
    assert given.strip() == same.strip()
    assert "minus" not in given


@pytest.mark.parametrize(
    ("template", "before", "number"),
    [(LAST_ANSWER_THINKS, THOUGHT, 4), (QWEN3, [user("1?"), assistant("one")], 3)],
    ids=["a question between", "two answers in a row"],
)
def test_a_template_that_rewrites_what_was_asked_is_refused_and_not_counted(
    template: str, before: list[Any], number: int, tmp_path: Path
) -> None:
    record = {
        "prompt": before,
        "chosen": [assistant("a long answer")],
        "rejected": [assistant("no")],
    }
    with pytest.raises(CorruptCheckpoint) as refused:
        read(tmp_path, [record], chatty(tmp_path, template))
    assert f"pairs.jsonl:1: message {number}: the conversation before this answer" in str(
        refused.value
    )
    assert "--chat-template FILE takes a template that keeps earlier turns" in str(refused.value)


def test_only_answers_that_are_not_shared_are_compared_in_longer_conversations(
    tmp_path: Path,
) -> None:
    tokenizer = chatty(tmp_path, QWEN3)
    common = [user("1?"), assistant("one"), user("2?")]
    record = {
        "chosen": [
            *common,
            assistant("<think>\nhm\n</think>\n\ntwo"),
            user("3?"),
            assistant("three"),
        ],
        "rejected": [*common, assistant("four"), user("3?"), assistant("five")],
    }
    (_, chosen), (_, rejected) = spelled(read(tmp_path, [record], tokenizer), tokenizer)
    assert chosen == "two<|im_end|><think>\n\n</think>\n\nthree<|im_end|>"
    assert rejected == "four<|im_end|><think>\n\n</think>\n\nfive<|im_end|>"


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "2?", "chosen": "two", "rejected": "three"},
        {"question": "2?", "system": "", "chosen": "two", "rejected": "three"},
        {"prompt": "2?", "chosen": [assistant("two")], "rejected": [assistant("three")]},
    ],
)
def test_a_question_is_the_users_turn(record: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of the record is left unread."""
    tokenizer = chatty(tmp_path, without_marks(MARKED["chatml"]))
    examples = read(tmp_path, [record], tokenizer)
    assert not examples.unread
    (given, chosen), (_, rejected) = spelled(examples, tokenizer)
    assert "<|im_start|>user\n2?<|im_end|>" in given
    assert (chosen.strip(), rejected.strip()) == ("two<|im_end|>", "three<|im_end|>")


def chatty(tmp_path: Path, template: str) -> Tokenizer:
    save_tokenizer(tmp_path / "tokenizer", template)
    return build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(tmp_path / "tokenizer")))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "1", "chosen": "2"}, 'has "prompt", "chosen", but no "rejected"'),
        ({"prompt": "1", "completion": "2"}, 'but no "chosen", "rejected"'),
        ({"prompt": "1", "chosen": 2, "rejected": "3"}, 'its "chosen" should be text or messages, found int'),
        ({"prompt": "1", "chosen": [], "rejected": "3"}, 'its "chosen" should be a list of messages'),
        ({"chosen": [user("1"), {"role": "assistant"}], "rejected": [user("1")]}, 'message 2 of its "chosen" has no "content"'),
        ({"prompt": [{"role": "judge", "content": "1"}], "chosen": "2", "rejected": "3"}, 'message 1 of its "prompt" is by \'judge\''),
        ({"prompt": "0", "chosen": [user("1"), assistant("2")], "rejected": [user("1"), assistant("3")]},
         'its "prompt" is no message of its "chosen"'),
        ({"chosen": [user("1"), assistant("2")], "rejected": [user("3"), assistant("2")]}, "part at message 1, which in \"chosen\""),
        ({"prompt": "1", "instruction": "2", "chosen": "3", "rejected": "4"}, '"instruction", which would be left out'),
        ({"prompt": "1", "chosen": "2", "rejected": [assistant("3")]}, 'its "chosen" is a text and its "rejected" messages'),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, 'its "rejected" is empty'),
    ],
)  # fmt: skip
def test_a_record_that_is_no_pair_is_refused_with_line_and_field(
    record: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint) as refused:
        read(tmp_path, [{"prompt": "1", "chosen": "2", "rejected": "3"}, record])
    assert "pairs.jsonl:2: " in str(refused.value)
    assert words in str(refused.value)


def test_answers_that_are_the_same_are_counted_and_left_out(tmp_path: Path) -> None:
    same = {"prompt": "1", "chosen": "2", "rejected": "2"}
    examples = read(tmp_path, [same, {"prompt": "1", "chosen": "2", "rejected": "3"}, same])
    assert (len(examples), examples.equal) == (2, 2)
    with pytest.raises(CorruptCheckpoint, match="there are no pairs whose answers differ"):
        read(tmp_path, [same])


def test_a_pair_is_two_rows_cut_alike_and_dropped_whole(tmp_path: Path) -> None:
    records = [
        {"prompt": "1", "chosen": "2 3 4 5 6 7 8 9", "rejected": "10"},
        {"prompt": "1 2 3 4 5 6 7", "chosen": "8", "rejected": "9"},
        {"prompt": "1 2 3 4 5 6", "chosen": "8", "rejected": "9"},
    ]
    pieces = pairs_for(read(tmp_path, records), 6)
    assert (len(pieces), pieces.cut, pieces.dropped) == (2, 2, 1)
    dataset, _, _ = split_datasets(pieces, None, None, 6, 0, (None, 0, 0))
    assert isinstance(dataset, PairDataset)
    sample = dataset[dataset.order.tolist().index(0)]
    assert sample.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 10, 0, 0, 0, 0]]
    assert sample.labels.tolist() == [[2, 3, 4, 5, 6, 7], [10, EOD, 0, 0, 0, 0]]
    assert sample.loss_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]


def test_a_pair_whose_answers_differ_only_after_the_cut_is_dropped(tmp_path: Path) -> None:
    records = [
        {"prompt": "1", "chosen": "2 3 4 5 6 7", "rejected": "2 3 4 5 6 8"},
        {"prompt": "1", "chosen": "2 3 4 5 6 7", "rejected": "2 3 4 9 6 7"},
    ]
    pieces = pairs_for(read(tmp_path, records), 5)
    assert (len(pieces), pieces.cut, pieces.dropped) == (1, 1, 1)
    assert len(pairs_for(read(tmp_path, records), 8)) == 2


def test_every_pair_is_drawn_once_an_epoch_in_an_order_of_the_seed(tmp_path: Path) -> None:
    records = [{"prompt": "1", "chosen": str(number + 2), "rejected": "50"} for number in range(20)]
    pieces = pairs_for(read(tmp_path, records), 8)
    orders = []
    for seed in (1, 1, 2):
        dataset, valid, _ = split_datasets(pieces, None, "80,20,0", 8, seed, (32, None, 0))
        assert isinstance(dataset, PairDataset)
        assert isinstance(valid, PairDataset)
        first, second = dataset.order[:16].tolist(), dataset.order[16:].tolist()
        assert sorted(first) == sorted(second) == list(range(16))
        assert first != second
        assert sorted(valid.order) == list(range(16, 20))
        orders.append(first)
    assert orders[0] == orders[1] != orders[2]


def test_a_preview_shows_both_answers(tmp_path: Path) -> None:
    pieces = pairs_for(read(tmp_path, [{"prompt": "1 2", "chosen": "3", "rejected": "4 5"}]), 8)
    dataset, _, _ = split_datasets(pieces, None, None, 8, 0, (None, 0, 0))
    assert dataset is not None
    assert list(preview(dataset[0], NUMBERS)) == [
        "the first pair: 5 of its tokens are compared",
        "  chosen", "    given   '1 2'", f"    learned '3 {EOD}'",
        "  rejected", "    given   '1 2'", f"    learned '4 5 {EOD}'",
    ]  # fmt: skip


def pair(number: int, **further: object) -> dict[str, object]:
    return {"prompt": f"{number}", "chosen": f"{number} 1 2", "rejected": f"{number}", **further}


def test_margins_stay_with_their_pairs(tmp_path: Path) -> None:
    same = {"prompt": "1", "chosen": "2", "rejected": "2", "margin": 9}
    late = pair(4, margin=8.0) | {"prompt": " ".join(["4"] * 10)}
    records = [pair(1, margin=1), same, pair(2), late, pair(3, margin=-0.5), pair(5, margin=None)]
    examples = read(tmp_path, records, margins=True)
    assert examples.margins is not None
    assert examples.margins.tolist() == [1, 0, 8, -0.5, 0]
    assert "margin" not in examples.unread
    pieces = pairs_for(examples, 6)
    assert pieces.dropped == 1
    dataset, *_ = split_datasets(pieces, None, None, 6, 1, [None, 0, 0])
    assert isinstance(dataset, PairDataset)
    samples = [dataset[index] for index in range(len(dataset))]
    found = {int(sample.tokens[0, 0]): sample.margin.tolist() for sample in samples}
    assert found == {1: [1], 2: [0], 3: [-0.5], 5: [0]}


def test_margins_that_no_pair_has_or_nobody_reads_are_none(tmp_path: Path) -> None:
    assert read(tmp_path, [pair(1), pair(2, margin=None)], margins=True).margins is None
    unread = read(tmp_path, [pair(1, margin=2.0)])
    assert unread.margins is None
    assert unread.unread == {"margin": 1}


@pytest.mark.parametrize(
    "margin",
    [float("nan"), float("inf"), 1e39, 10**400, "1", True, [1]],
    ids=["nan", "inf", "over float32", "over float64", "text", "bool", "list"],
)
def test_a_margin_that_is_no_finite_number_is_refused_with_its_line(
    margin: object, tmp_path: Path
) -> None:
    records = [pair(1, margin=0.5), pair(2, margin=margin)]
    words = r'pairs.jsonl:2: its "margin" has to be a finite number, found '
    with pytest.raises(CorruptCheckpoint, match=words):
        read(tmp_path, records, margins=True)
    assert read(tmp_path, records).margins is None
