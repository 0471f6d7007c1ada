"""`embed` and `retrieve` from the command line, with the hash embedder; and rows of a biencoder's towers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from megatron_lite.retrieval.commands.embed import main as embed
from megatron_lite.retrieval.commands.retrieve import main as retrieve
from megatron_lite.retrieval.embedder import OneTower, Passage
from megatron_lite.retrieval.embedding import embed_all
from megatron_lite.retrieval.evidence import blocks_of, open_evidence
from megatron_lite.retrieval.hash_embedder import HashEmbedder
from megatron_lite.retrieval.team import Team
from megatron_lite.retrieval.towers import TowerEmbedder, passage_row, question_row
from megatron_lite.retrieval.vector_files import VectorFiles

pytest.importorskip("faiss")
pytest.importorskip("regex")

BLOCKS = Path(__file__).parents[1] / "fixtures" / "blocks"
EXPECTED = np.load(BLOCKS / "expected.npz")
SPECIAL = Special(cls=2, sep=3, pad=0)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh")
PASSAGES = [
    (7, "Paris is in France", "Paris"),
    (9, 'a "quoted"\nlong text', ""),
    (3, "cats and dogs", "Pets"),
]


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A TSV with a quoted field of two lines."""
    path = tmp_path / "psgs.tsv"
    lines = [
        "id\ttext\ttitle",
        "7\tParis is in France\tParis",
        '9\t"a ""quoted""\nlong text"\t',
        "3\tcats and dogs\tPets",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_passages_of_a_table_follow_the_rules_of_csv(evidence: Path, tmp_path: Path) -> None:
    assert [tuple(row[:3]) for row in open_evidence(evidence).rows()] == PASSAGES
    path = tmp_path / "passages.jsonl"
    rows = [{"id": number, "text": text, "title": title} for number, text, title in PASSAGES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [tuple(row[:3]) for row in open_evidence(path).rows()] == PASSAGES


def run(command: Any, *words: object) -> int:
    status: int = command([str(word) for word in words])
    return status


def test_questions_find_their_passages(
    evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`retrieve` takes the embedder and the passages from the index."""
    index, hits, metrics = tmp_path / "index", tmp_path / "hits.jsonl", tmp_path / "metrics.jsonl"
    assert (
        run(
            embed,
            "--embedder",
            "hash:128",
            "--evidence-data-path",
            evidence,
            "--output",
            index,
            "--shard-rows",
            2,
        )
        == 0
    )
    (tmp_path / "qa.csv").write_text(
        "cats and\t['dogs']\nFrance\t['London', 'paris']\nlong text\t['cats']\n"
    )
    words = (
        "--index",
        index,
        "--qa-data",
        tmp_path / "qa.csv",
        "--top-k",
        1,
        3,
        "--output",
        hits,
        "--metrics-file",
        metrics,
    )
    assert run(retrieve, *words) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["top1_acc 0.6667", "top3_acc 1.0000"]
    rows = [json.loads(line) for line in hits.read_text(encoding="utf-8").splitlines()]
    assert [row["question"] for row in rows] == ["cats and", "France", "long text"]
    assert rows[1]["answers"] == ["London", "paris"]
    best = rows[0]["hits"][0]
    assert (best["id"], best["title"], best["has_answer"]) == (3, "Pets", True)
    assert len(rows[0]["hits"]) == 3
    assert json.loads(metrics.read_text(encoding="utf-8")) == {
        "questions": 3,
        "top1_acc": 2 / 3,
        "top3_acc": 1.0,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --index or --block-data"),
        (("--index", "nowhere"), "`megatron-lite embed` writes it"),
        (("--index", "INDEX", "--top-k", "0"), "a number of at least 1"),
        (("--index", "INDEX", "--embedder", "hash:32"), "with other weights than hash:32"),
        (("--index", "INDEX", "--faiss-index", "Flt"), "could not parse index string"),
        (("--index", "INDEX", "--evidence-data-path", "OTHER"), "was made of other passages"),
        (("--block-data", "nowhere"), "--block-data needs --evidence-data-path"),
    ],
)
def test_wrong_flags_get_one_line(
    words: tuple[str, ...],
    message: str,
    evidence: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = tmp_path / "index"
    assert (
        run(embed, "--embedder", "hash:16", "--evidence-data-path", evidence, "--output", index)
        == 0
    )
    (tmp_path / "qa.csv").write_text("cats and\t['dogs']\n")
    (tmp_path / "other.tsv").write_text("1\ta\tb\n")
    places = {"INDEX": index, "OTHER": tmp_path / "other.tsv"}
    given = [places.get(word, word) for word in words]
    status = run(retrieve, "--qa-data", tmp_path / "qa.csv", "--output", tmp_path / "hits", *given)
    assert status in (2, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_passages_that_were_refused_may_be_corrected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failed run has left no vectors, which the corrected passages could contradict."""
    passages, index = tmp_path / "passages.tsv", tmp_path / "index"
    words = ("--embedder", "hash:16", "--evidence-data-path", passages, "--output", index)
    passages.write_text("7\tParis is in France\n")
    assert run(embed, *words) == 3
    assert "has 2 columns" in capsys.readouterr().err
    passages.write_text("7\tParis is in France\tParis\n")
    assert run(embed, *words) == 0
    assert VectorFiles(index).meta().evidence == open_evidence(passages).identity()
    passages.write_text("8\tParis is in France\tParis\n")
    assert run(embed, *words) == 2


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("shards", [1, 2])
def test_an_ended_run_goes_on_and_two_processes_write_the_same(
    shards: int, evidence: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends after `shards` shards; then two processes, one after the other here, write the missing ones."""
    words = (
        "--embedder",
        "hash:16",
        "--evidence-data-path",
        evidence,
        "--shard-rows",
        1,
        "--output",
    )
    assert run(embed, *words, tmp_path / "whole") == 0
    calls, passages = [0], OneTower.passages

    def fails(self: OneTower, rows: Any) -> Any:
        calls[0] += 1
        if calls[0] > shards:
            raise KeyboardInterrupt
        return passages(self, rows)

    monkeypatch.setattr(OneTower, "passages", fails)
    assert run(embed, *words, tmp_path / "ended") == 130
    monkeypatch.undo()
    files = VectorFiles(tmp_path / "ended")
    monkeypatch.setattr(Team, "wait", lambda self: None)
    for rank in (1, 0):
        embed_all(
            open_evidence(evidence), OneTower(HashEmbedder(16)), files, files.meta(), Team(rank, 2)
        )
    assert contents(tmp_path / "whole") == contents(tmp_path / "ended")


def test_other_flags_do_not_continue_a_run(
    evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--evidence-data-path", evidence, "--output", tmp_path / "index", "--embedder")
    assert run(embed, *words, "hash:16") == 0
    assert run(embed, *words, "hash:32") == 2
    assert "was begun with embedder 'hash:16', not 'hash:32'" in capsys.readouterr().err


def test_blocks_of_a_corpus_are_those_that_megatron_indexes() -> None:
    tokenizer = build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=200))
    names = [str(BLOCKS / f"corpus_{key}_sentence") for key in ("text", "title")]
    rows = list(blocks_of(*names, tokenizer, SPECIAL, 64).rows())
    assert [row.id for row in rows] == EXPECTED["full/mapping"][:, 3].tolist()
    found = np.stack([row.tokens for row in rows if row.tokens is not None])
    assert np.array_equal(found, EXPECTED["full/blocks"])


class Towers:
    """Towers whose vectors are the sum of a row's ids, and their number."""

    width = 2
    fingerprint = "towers"
    seq_length = 8

    def __init__(self, vocabulary: Path) -> None:
        vocabulary.write_text("\n".join(WORDS), encoding="utf-8")
        self.tokenizer = build_tokenizer(
            TokenizerOptions("BertWordPieceLowerCase", vocab_file=vocabulary)
        )

    def query(self, ids: Any) -> Any:
        return np.stack([ids.sum(1), (ids > 0).sum(1)], 1).astype(np.float32)

    def context(self, ids: Any) -> Any:
        return -self.query(ids)


def test_rows_of_towers_are_truncated_before_the_last_separator(tmp_path: Path) -> None:
    assert question_row([5, 6, 7], 4, SPECIAL).tolist() == [2, 5, 6, 3]
    assert passage_row([5], [6, 7], 8, SPECIAL).tolist() == [2, 5, 3, 6, 7, 3, 0, 0]
    assert passage_row([5], [6, 7, 8, 9], 6, SPECIAL).tolist() == [2, 5, 3, 6, 7, 3]
    embedder = TowerEmbedder(Towers(tmp_path / "vocab.txt"), "ict", 8, 4, 2)
    texts = ["a", "b c d", ""]
    assert embedder.queries(texts).tolist() == [[10, 3], [18, 4], [5, 2]]
    rows = [Passage(0, "a b", "c"), Passage(1, "", "", np.array([2, 9, 3, 0]))]
    assert embedder.passages(rows).tolist() == [[-26, -6], [-14, -3]]
