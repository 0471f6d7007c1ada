"""Answers are found, and questions answered, as ORQA's own functions did (fixtures/retrieval)."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint, UnsafeContent
from megatron_lite.retrieval.answers import matcher
from megatron_lite.retrieval.block_data import BlockData
from megatron_lite.retrieval.embedder import Passage
from megatron_lite.retrieval.evidence import open_evidence
from megatron_lite.retrieval.hits import hits_of
from megatron_lite.retrieval.questions import Question, read_questions
from megatron_lite.retrieval.vector_files import Shards, VectorFiles
from megatron_lite.retrieval.vector_search import find

FIXTURE = Path(__file__).parents[1] / "fixtures" / "retrieval"
QA: dict[str, Any] = json.loads((FIXTURE / "qa.json").read_text(encoding="utf-8"))
VECTORS = np.load(FIXTURE / "qa-embeddings.npz")
RETRIEVAL = QA["retrieval"]

pytest.importorskip("faiss")
pytest.importorskip("regex")


@pytest.mark.parametrize("kind", ["string", "regex"])
def test_answers_are_found_as_by_orqa(kind: str) -> None:
    contains = matcher(kind)
    for case in QA[kind]:
        assert contains(case["answers"], case["text"]) == case["hit"], case


class InShards:
    """The fixture's vectors in shards of some rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def shards(self) -> Any:
        ids, vectors = VECTORS["ids"], VECTORS["embeddings"]
        for first in range(0, len(ids), self.rows):
            yield ids[first : first + self.rows], vectors[first : first + self.rows]


@pytest.mark.parametrize("rows", [40, 7, 1])
@pytest.mark.parametrize("text", ["Flat", "IVF2,Flat", "HNSW16,Flat"])
def test_passages_and_accuracies_are_orqas(rows: int, text: str) -> None:
    """Ids, scores and accuracies; the search of all lists and a dense graph are exact here."""
    stored: Shards = InShards(rows)
    found = find(stored, VECTORS["queries"], 10, text, nprobe=2, ef_search=64)
    assert found[1].tolist() == RETRIEVAL["ids"]
    np.testing.assert_allclose(found[0], RETRIEVAL["scores"], rtol=1e-6)
    questions = [
        Question(str(place), tuple(answers)) for place, answers in enumerate(RETRIEVAL["answers"])
    ]
    hits = hits_of(questions, found)
    hits.judge((Passage(*row) for row in RETRIEVAL["documents"]), matcher("string"))
    assert [hits.accuracy(count) for count in range(1, 11)] == RETRIEVAL["accuracy"]
    assert hits.rows[0][0].title == f"t{hits.rows[0][0].id}"


def test_a_hit_that_is_not_in_the_evidence_is_refused() -> None:
    found = find(InShards(40), VECTORS["queries"], 10, "Flat", 1, 1)
    hits = hits_of([Question("", ("a",))] * 15, found)
    with pytest.raises(CorruptCheckpoint, match="passage 1 of the index is not in the evidence"):
        hits.judge((Passage(*row) for row in RETRIEVAL["documents"][1:]), matcher("string"))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_megatrons_block_data_are_read(tmp_path: Path, protocol: int) -> None:
    table = dict(zip(VECTORS["ids"].tolist(), VECTORS["embeddings"], strict=True))
    path = tmp_path / "embeds.pkl"
    path.write_bytes(pickle.dumps({"embed_data": table, "meta_data": {}}, protocol))
    ((ids, vectors),) = BlockData(path).shards()
    assert np.array_equal(ids, VECTORS["ids"])
    assert vectors.dtype == np.float16
    assert np.array_equal(vectors, VECTORS["embeddings"])


def test_block_data_that_run_code_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "embeds.pkl"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsafeContent):
        list(BlockData(path).shards())
    path.write_bytes(pickle.dumps({"embed_data": [1]}))
    with pytest.raises(CorruptCheckpoint, match="has no `embed_data` of vectors by number"):
        list(BlockData(path).shards())
    path.write_bytes(pickle.dumps({"embed_data": {1: "a"}}))
    with pytest.raises(CorruptCheckpoint, match="is not a vector of floats"):
        list(BlockData(path).shards())
    vectors = {1: np.zeros(3, np.float16), 2: np.zeros(4, np.float16)}
    path.write_bytes(pickle.dumps({"embed_data": vectors}))
    with pytest.raises(CorruptCheckpoint, match="have different numbers of floats"):
        list(BlockData(path).shards())


@pytest.mark.parametrize(
    "text",
    [
        "who?\t['a', 'b\"c']\n",
        'who?\t["a", "b\\"c"]\n',
        '{"question": "who?", "answers": ["a", "b\\"c"]}\n',
        '[{"question": "who?", "answers": ["a", "b\\"c"]}]',
    ],
)
def test_questions_are_read_in_every_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "qa"
    path.write_text(text, encoding="utf-8")
    assert read_questions(path) == [Question("who?", ("a", 'b"c'))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("who?\n", ":1: has 1 column;"),
        ("who?\t__import__('os')\n", ":1: the answers are not a list"),
        ("a\t['b']\nwho?\t{1: 2}\n", ":2: a question and a list of answers"),
        ("{", "is not JSON"),
        ("[1]", "row 1: is not an object"),
        ("", "has no questions"),
    ],
)
def test_wrong_questions_are_refused_with_their_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "qa"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorruptCheckpoint, match=message):
        read_questions(path)


def test_an_index_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="finish `megatron-lite embed`"):
        next(VectorFiles(tmp_path).shards())


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ('{"question": "who\u2028is?", "answers": ["a"]}\n', "who\u2028is?"),
        ("who\x85is?\t['a']\n", "who\x85is?"),
        ("\"who\nis?\"\t['a']\n", "who\nis?"),
    ],
)
def test_other_line_ends_within_a_question_are_kept(
    text: str, question: str, tmp_path: Path
) -> None:
    path = tmp_path / "qa"
    path.write_text(text, encoding="utf-8")
    assert read_questions(path) == [Question(question, ("a",))]


@pytest.mark.parametrize("name", ["passages.tsv", "passages.jsonl", "qa.csv"])
def test_files_that_are_not_utf_8_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"1\t\xe9\ta\n")
    with pytest.raises(CorruptCheckpoint, match=f"{name}: is not text in UTF-8"):
        read_questions(path) if name == "qa.csv" else list(open_evidence(path).rows())


@pytest.mark.parametrize("number", ["1.5", "1e400", "-1", "[]"])
def test_a_passage_is_named_by_a_whole_number(number: str, tmp_path: Path) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_text(f'{{"id": {number}, "text": "a"}}\n')
    with pytest.raises(CorruptCheckpoint, match=r":1: the id .* is not a number"):
        list(open_evidence(path).rows())


def test_a_quotation_mark_without_its_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text('1\t"' + "a" * (1 << 24) + "b\tc\n", encoding="utf-8")
    with pytest.raises(CorruptCheckpoint, match=r":1: .*look for a quotation mark without"):
        list(open_evidence(path).rows())
