"""Examples for finetuning: every form of record and file; packed whole, learned where they should be, in an order that depends on
nothing but the seed."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.finetuning.dataset import FinetuneDataset
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.packing import pack
from megatron_lite.data.finetuning.pieces import pieces_for
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.data.finetuning.splits import split_datasets
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from tests.trainer.data.chat_templates import MARKED, save_tokenizer

EOD = 100
TOKENIZER = NullTokenizer(EOD)


def read(tmp_path: Path, records: list[Any], form: str | None = None) -> Examples:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_examples([str(path)], TOKENIZER, ReadingOptions(form))


def build(
    tmp_path: Path,
    records: list[Any],
    samples: int | None = None,
    split: str | None = None,
    seed: int = 1234,
) -> list[Dataset | None]:
    return split_datasets(
        pieces_for(read(tmp_path, records), 8), None, split, 8, seed, (samples, samples, samples)
    )


def test_the_completion_and_the_end_are_learned_and_the_prompt_is_not(tmp_path: Path) -> None:
    dataset = build(tmp_path, [{"prompt": "1 2 3", "completion": "4 5"}])[0]
    assert dataset is not None
    sample = dataset[0]
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert sample.labels.tolist() == [2, 3, 4, 5, EOD, 0, 0, 0]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert sample.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert sample.documents.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_whole_text_is_learned(tmp_path: Path) -> None:
    dataset = build(tmp_path, [{"text": "1 2"}, {"input": "3", "output": "4"}], seed=3)[0]
    assert dataset is not None
    first, second = sorted(
        zip(dataset[0].tokens[:4].tolist(), dataset[0].loss_mask[:4].tolist(), strict=True)
    )[:2]
    assert (first, second) == ((1, 1.0), (2, 1.0))
    masks = dict(zip(dataset[0].tokens.tolist(), dataset[0].loss_mask.tolist(), strict=True))
    assert masks[3] == 1.0  # its label is the token 4


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
    tokens = np.concatenate(
        [np.full(size, number + 1) for number, size in enumerate(sizes)]
    ).astype(np.int32)
    examples = Examples(tokens, np.ones(len(tokens), bool), bounds, np.zeros(len(sizes), bool))
    pieces = pieces_for(examples, seq_length)
    assert (pieces.cut, pieces.dropped) == (sum(size > seq_length + 1 for size in sizes), 0)
    dataset = FinetuneDataset(pieces, np.arange(len(sizes)), seq_length, samples, seed)
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
    again = FinetuneDataset(pieces, np.arange(len(sizes)), seq_length, samples, seed)
    assert all(
        np.array_equal(dataset[number].tokens, again[number].tokens)
        for number in range(len(dataset))
    )


def test_parts_for_evaluation(tmp_path: Path) -> None:
    records = [{"text": f"{number} {number}"} for number in range(20)]
    assert [found is None for found in build(tmp_path, records, 5)] == [False, True, True]
    train, valid, test = build(tmp_path, records, 30, split="8,2,0")
    assert test is None
    assert train is not None
    assert valid is not None
    seen = [
        {int(token) for number in range(30) for token in each[number].tokens[:1]}
        for each in (train, valid)
    ]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"prompt": "1"},
            '"prompt", but not the fields of an example: "messages"; "conversations"; "instruction", "output"',
        ),
        ({"text": 1}, 'its "text" should be text, found int'),
        ([], "not a JSON object"),
        ({"text": "one"}, "the text 'one' is not a row of token ids, .*--tokenizer-model"),
        ({"text": ""}, "the text '' is not a row of token ids"),
        (
            {"prompt": "1", "completion": "2", "text": "3"},
            '"text", which would be left out; .*--finetune-form messages',
        ),
        (
            {"instruction": "1", "input": "2", "output": "3", "text": "4"},
            '"text", which would be left out',
        ),
        (
            {"instruction": "1", "output": "3", "history": [["4", "5"]]},
            '"history", which would be left out',
        ),
        ({"text": "1", "instruction": "2"}, '"instruction", which would be left out'),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, "pair of a chosen and a rejected answer"),
        ({"messages": "1"}, "should be a list of messages"),
        (
            {"messages": [{"role": "robot", "content": "1"}]},
            "message 1 of its \"messages\" is by 'robot'; there are system",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "has an image, and the model of this run reads text alone",
        ),
        ({"messages": [{"role": "assistant", "content": "1", "weight": 0}]}, "loss weight"),
        ({"conversations": [{"from": "human"}]}, 'has no "content"'),
        ({"text": "1 \ud800"}, "half of a surrogate pair, which is no character"),
    ],
    ids=str,
)
def test_a_record_that_is_no_example_is_reported_with_its_line(
    tmp_path: Path, record: Any, words: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=rf"examples\.jsonl:2: .*{words}"):
        read(tmp_path, [{"text": "1"}, record])


def test_half_a_character_in_a_chat_is_reported_in_these_words(tmp_path: Path) -> None:
    """A tokenizer reports it as an input of a wrong type."""
    save_tokenizer(tmp_path / "tokenizer", MARKED["chatml"])
    chat = {
        "messages": [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "one \ud800"},
        ]
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "tokenizer"))
    with pytest.raises(CorruptCheckpoint, match=r"jsonl:1: it has half of a surrogate pair"):
        read_examples([str(tmp_path / "chats.jsonl")], tokenizer)


def test_the_form_can_be_named_and_null_or_empty_fields_are_none(tmp_path: Path) -> None:
    both = {"instruction": "1", "input": "2", "output": "3", "text": "4 5"}
    assert read(tmp_path, [both], "text").tokens.tolist() == [4, 5, EOD]
    assert read(
        tmp_path, [{"input": "1", "output": "2", "text": "3"}], "prompt"
    ).tokens.tolist() == [1, 2, EOD]
    tables = {"text": "4", "messages": None, "history": [], "system": ""}
    assert read(tmp_path, [tables]).tokens.tolist() == [4, EOD]
    with pytest.raises(CorruptCheckpoint, match='but not the fields of an example: "messages"'):
        read(tmp_path, [both], "messages")


def test_metadata_is_counted(tmp_path: Path) -> None:
    found = read(tmp_path, [{"text": "1", "id": 1, "source": "x"}, {"text": "1", "id": 2}])
    assert dict(found.unread) == {"id": 2, "source": 1}


def test_a_file_without_examples_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no examples"):
        read(tmp_path, [])


def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    records = [{"prompt": "1 2", "completion": "3"}, {"prompt": "4", "completion": "5 6"}]
    lines = "\n\n".join(map(json.dumps, records))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text("\n " + json.dumps(records, indent=1))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    expected = read_examples([str(tmp_path / "a.jsonl")], TOKENIZER).tokens.tolist()
    assert expected == [1, 2, 3, EOD, 4, 5, 6, EOD]
    for name in ("a.json", "a.json.gz", "a.parquet"):
        assert read_examples([str(tmp_path / name)], TOKENIZER).tokens.tolist() == expected, name
    both = read_examples([str(tmp_path / "*.json*")], TOKENIZER)
    assert both.tokens.tolist() == expected * 3


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b'[{"text": "1"}, 2]', r"a\.json:2: item 2 of the array is not a JSON object"),
        ("a.json", b'[{"text": "1"}', r"a\.json: begins like a JSON array but is not one"),
        ("a.json", b'[{"text": "1"}, {}]', r"a\.json:2: has no fields"),
        ("a.txt", b"\xff", r"a\.txt: is not text in UTF-8: byte 0"),
        ("a.parquet", b"PAR1", r"a\.parquet: is truncated or damaged"),
    ],
)
def test_broken_files_are_reported(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=words):
        read_examples([str(tmp_path / name)], TOKENIZER)


def test_files_that_are_not_there_and_standard_input_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--valid-finetune-data .*none\.jsonl: there is no such file"
    ):
        read_examples([str(tmp_path / "none.jsonl")], TOKENIZER, flag="--valid-finetune-data")
    with pytest.raises(UsageError, match="--finetune-data -: every process reads"):
        read_examples(["-"], TOKENIZER)


def test_a_plain_text_goes_on_in_the_next_sample_and_every_token_is_predicted_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "book.txt").write_text(" ".join(map(str, range(20))))
    pieces = pieces_for(read_examples([str(tmp_path / "book.txt")], TOKENIZER), 8)
    dataset = FinetuneDataset(pieces, np.arange(len(pieces)), 8, None, 0)
    labels = sorted(
        int(label)
        for k in range(len(dataset))
        for label in dataset[k].labels[dataset[k].loss_mask > 0]
    )
    assert labels == [*range(1, 20), EOD]
    assert (pieces.cut, pieces.dropped) == (0, 0)


def test_a_directory_stands_for_its_files_and_records_are_known_by_their_first_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.md").write_text("4 5")
    (tmp_path / "texts" / "a.txt").write_text('{"prompt": "1", "completion": "2"}\n')
    examples = read_examples([str(tmp_path / "texts")], TOKENIZER)
    assert examples.tokens.tolist() == [1, 2, EOD, 4, 5, EOD]
    assert examples.learned.tolist() == [False, True, True, True, True, True]
    assert examples.divisible.tolist() == [False, True]


def test_truncated_and_dropped_examples_are_counted(tmp_path: Path) -> None:
    long = " ".join("1" * 20)
    records = [
        {"prompt": "1", "completion": long},
        {"prompt": long, "completion": "2"},
        {"prompt": "1", "completion": "2"},
    ]
    pieces = pieces_for(read(tmp_path, records), 8)
    assert (len(pieces), pieces.cut, pieces.dropped) == (2, 1, 1)
    with pytest.raises(CorruptCheckpoint, match="--seq-length takes more"):
        build(tmp_path, records[1:2])


def test_packing_leaves_little_room() -> None:
    sizes = np.array([7, 5, 4, 3, 3, 2])
    assert pack(range(6), sizes, 8) == [[0], [1, 3], [2, 4], [5]]
    random = np.random.default_rng(0)
    sizes = np.sort(random.integers(1, 60, 4000))[::-1]
    packs = pack(range(len(sizes)), sizes, 100)
    assert all(sizes[numbers].sum() <= 100 for numbers in packs)
    assert sizes.sum() / (len(packs) * 100) > 0.99


def test_a_preview_shows_what_is_learned(tmp_path: Path) -> None:
    dataset = build(tmp_path, [{"prompt": "1 2 3", "completion": "4 5"}])[0]
    assert dataset is not None
    assert list(preview(dataset[0], TOKENIZER)) == [
        "the first sample: 3 of its 8 tokens are learned",
        "  example 1",
        "    given   '1 2 3'",
        "    learned '4 5 100'",
    ]
