"""Queries with documents: the forms of their records, and the samples that a data set gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.embedding_form import EmbeddingForm, end_tokens, text_tokens
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.queries import Queries, QueryRecord, read_queries, read_query
from megatron_lite.data.finetuning.query_dataset import NO_DOCUMENT, query_dataset, shortened
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from tests.trainer.vectors import save_tokenizer

FORMS: list[tuple[Mapping[str, Any], QueryRecord]] = [
    (
        {"anchor": "q", "positive": "a", "negative": "n"},
        QueryRecord("q", None, ["a"], ["n"], frozenset()),
    ),
    (
        {"query": "q", "positive": "a", "negative_1": "n", "negative_2": ["o", "p"], "score": 3},
        QueryRecord("q", None, ["a"], ["n", "o", "p"], frozenset({"score"})),
    ),
    (
        {"query": "q", "pos": ["a", "b"], "neg": ["n"], "prompt": "ask: ", "pos_scores": [1, 2]},
        QueryRecord("q", "ask: ", ["a", "b"], ["n"], frozenset({"pos_scores"})),
    ),
    (
        {
            "query": "q", "query_id": "7", "positive_passages": [{"docid": 1, "title": "t", "text": "a"}],
            "negative_passages": [{"title": "", "text": "n"}],
        },
        QueryRecord("q", None, ["t a"], ["n"], frozenset({"query_id"})),
    ),
    ({"question": "q", "answer": "a"}, QueryRecord("q", None, ["a"], [], frozenset())),
    ({"query": "q", "pos": "a", "neg": None}, QueryRecord("q", None, ["a"], [], frozenset())),
]  # fmt: skip


@pytest.mark.parametrize(("record", "expected"), FORMS)
def test_records_of_other_trainers_are_read(
    record: Mapping[str, Any], expected: QueryRecord
) -> None:
    assert read_query(record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "q"}, 'has "text", but no query: one of "query", "anchor", "question"'),
        ({"query": "q"}, 'has "query", but no document that answers its query: one of "positive"'),
        ({"query": "q", "anchor": "r", "pos": "a"}, 'has "query", "anchor"; only one of them'),
        ({"query": "q", "pos": []}, 'its "pos" is an empty list'),
        ({"query": "", "pos": "a"}, 'its "query" is empty'),
        ({"query": "q", "pos": [3]}, 'its "pos" should be text, found 3'),
        ({"query": "q", "pos": [{"title": "t"}]}, 'its "pos.text" should be text, found None'),
    ],
)
def test_other_records_are_refused(record: Mapping[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message.replace("(", r"\(")):
        read_query(record)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return HuggingFaceTokenizer(str(directory))


LINES = """\
{"query": "w1", "pos": ["w2", "w3", "w4"], "neg": ["w5", "w6", "w7"]}
{"query": "w8 w9", "pos": "w2", "prompt": "w0 "}
{"query": "w1", "pos": "w10 w11 w12 w13 w14", "neg": "w5"}
"""
FORM = EmbeddingForm(prompts={"query": "w30 ", "document": "w40 "})


@pytest.fixture
def queries(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> Queries:
    (tmp_path / "q.jsonl").write_text(LINES)
    return read_queries([str(tmp_path / "q.jsonl")], tokenizer, FORM)


def test_equal_texts_have_equal_numbers_and_prompts_precede_them(
    queries: Queries, tokenizer: HuggingFaceTokenizer
) -> None:
    def text(number: int) -> str:
        return tokenizer.spelled(queries.texts[number].tolist())

    assert [text(number) for number in queries.queries] == [
        "<s> w30 w1 </s>", "<s> w0 w8 w9 </s>", "<s> w30 w1 </s>",
    ]  # fmt: skip
    assert queries.queries[0] == queries.queries[2]
    assert queries.answers[0][0] == queries.answers[1][0]
    assert queries.others[0][0] == queries.others[2][0]
    assert text(queries.answers[0][0]) == "<s> w40 w2 </s>"
    assert (queries.others[1].tolist(), queries.others.longest) == ([], 3)


def test_each_epoch_takes_the_next_documents(queries: Queries) -> None:
    """Of three documents that answer a query, and of three hard negatives, two of which are in a sample."""
    dataset = query_dataset(queries, np.array([0]), 8, 4, 5, negatives=2, ending=1)
    own, others = queries.answers[0].tolist(), queries.others[0].tolist()
    taken = [dataset[epoch].documents.tolist() for epoch in range(4)]
    assert [documents[0] for documents in taken] == [*own, own[0]]
    assert [documents[1:] for documents in taken] == [
        others[:2], [others[2], others[0]], others[1:], others[:2],
    ]  # fmt: skip


def test_a_missing_negative_is_a_row_of_one_token(queries: Queries) -> None:
    sample = query_dataset(queries, np.array([1]), 8, 1, 5, negatives=1, ending=1)[0]
    assert sample.documents.tolist() == [queries.answers[1][0], NO_DOCUMENT]
    assert sample.lengths.tolist() == [5, 4, 1]
    assert not sample.tokens[2].any()


def test_a_long_text_is_shortened_as_the_tokenizer_does(
    queries: Queries, tokenizer: HuggingFaceTokenizer
) -> None:
    ending = end_tokens(tokenizer)
    assert ending == 1
    long = queries.texts[queries.answers[2][0]]
    spelled = "w40 w10 w11 w12 w13 w14"
    assert long.tolist() == text_tokens(tokenizer, spelled)
    for length in range(3, 10):
        assert shortened(long, length, ending).tolist() == text_tokens(tokenizer, spelled, length)
    assert end_tokens(NullTokenizer(9)) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "q.jsonl:2: is not JSON"),
        ('{"query": "w1"}', 'q.jsonl:2: has "query", but no document'),
        ('{"query": "w1", "pos": "\\ud800"}', "q.jsonl:2: it has half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(
    line: str, message: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"query": "w1", "pos": "w2"}}\n{line}\n')
    with pytest.raises(CorruptCheckpoint, match=message):
        read_queries([str(path)], tokenizer, EmbeddingForm())


def test_files_without_queries_are_refused(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n")
    with pytest.raises(CorruptCheckpoint, match="there are no queries"):
        read_queries([str(path)], tokenizer, EmbeddingForm())
    (tmp_path / "q.txt").write_text("a text")
    with pytest.raises(CorruptCheckpoint, match="is plain text; expected records with a query"):
        read_queries([str(tmp_path / "q.txt")], tokenizer, EmbeddingForm())
