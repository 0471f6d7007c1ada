"""The towers of a biencoder embed as Megatron's models do, and from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from megatron_lite.inference.towers import EngineTowers
from megatron_lite.retrieval.commands.embed import main as embed
from megatron_lite.retrieval.commands.retrieve import main as retrieve
from tests.trainer.parallel.test_biencoders import Case, make_engine

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "trainer" / "fixtures" / "retriever"
BLOCKS = ROOT / "trainer" / "fixtures" / "blocks"
SAMPLES = np.load(BLOCKS / "expected.npz")
TOKENIZER = TokenizerOptions("BertWordPieceLowerCase", vocab_file=FIXTURES / "vocab.txt")

pytest.importorskip("faiss")
pytest.importorskip("regex")


@pytest.mark.parametrize("model", ["separate", "shared", "pooler"])
def test_vectors_are_those_of_megatrons_models(model: str) -> None:
    """The vectors are those of the first step's eight samples."""
    towers = EngineTowers(make_engine(Case(model)), "none", build_tokenizer(TOKENIZER))
    wanted = load_file(FIXTURES / f"{model}-step1.safetensors")
    queries = towers.query(SAMPLES["train/query"][:8].astype(np.int64))
    contexts = towers.context(SAMPLES["train/context"][:8].astype(np.int64))
    np.testing.assert_allclose(queries, wanted["query_embeddings"], atol=1e-5)
    np.testing.assert_allclose(contexts, wanted["context_embeddings"], atol=1e-5)
    assert queries.shape[1] == towers.width


def test_a_biencoder_of_megatron_embeds_and_retrieves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a corpus, and a question with the words of one of them. `retrieve` opens the same model again."""
    index = tmp_path / "index"
    model = ["--load", str(ROOT / "fixtures" / "biencoder-legacy-separate")]
    words = ["--vocab-file", str(FIXTURES / "vocab.txt"), "--output"]
    data = ["--data-path", str(BLOCKS / "corpus_text_sentence"), "--seq-length", "64"]
    titles = ["--titles-data-path", str(BLOCKS / "corpus_title_sentence")]
    assert embed([*model, *data, *titles, *words, str(index)]) == 0
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question": "a", "answers": [""]}))
    asked = ["--index", str(index), "--qa-data", str(tmp_path / "qa.jsonl"), "--top-k", "3"]
    assert retrieve([*asked, *words, str(tmp_path / "hits.jsonl")]) == 0
    assert "top3_acc 1.0000" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "hits.jsonl").read_text(encoding="utf-8").splitlines())
    assert len(row["hits"]) == 3
    assert retrieve([*asked, *model, "--embedder", "hash", *words, str(tmp_path / "x")]) == 2


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages = tmp_path / "passages.jsonl"
    passages.write_text('{"text": "a"}\n')
    bert = ROOT / "fixtures" / "core-bert-tp2pp2" / "checkpoint"
    words = ["--load", str(bert), "--evidence-data-path", str(passages), "--output"]
    assert embed([*words, str(tmp_path / "index")]) == 2
    assert "is a bert; a biencoder or a decoder was expected" in capsys.readouterr().err
