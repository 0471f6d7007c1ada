"""Generation of a Retro with passages, and its loss with, without and with random neighbors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import NullTokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.commands.generate import parser
from megatron_lite.inference.live_search import LiveSearch
from megatron_lite.inference.questions import check_questions
from megatron_lite.inference.retrieved import neighbors_of, read_retrieved
from megatron_lite.inference.retrieving import RetrievingModel, same_for_all
from megatron_lite.inference.slots import Feed
from megatron_lite.models.batch import Microbatch
from megatron_lite.retrieval.retro.project import open_project
from megatron_lite.retrieval.retro.searching import Searcher, open_searcher
from tests.trainer.parallel.test_retro import Case, array, make_engine
from tests.trainer.retrieval.retro_fixture import EOD, megatrons_project
from tests.trainer.retrieval.test_retro_build import (
    TableEmbedder,
    built,
    first_word_ends_documents,
)

__all__ = ["first_word_ends_documents"]


def test_each_token_is_the_one_of_the_whole_text_with_its_passages(tmp_path: Path) -> None:
    """Token by token, the logits are those of one pass over the text, whose chunks all have the passages."""
    engine = make_engine(Case("rope"), trains=False)
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"prompt": "1 2 3", "neighbors": ["5 6 7", "8 9", "10"]}) + "\n"
    )
    (asked,) = read_retrieved(str(tmp_path / "asked.jsonl"))
    source = neighbors_of(engine.config.retrieval, NullTokenizer(95), asked)
    assert source.tolist() == [[5, 6, 7, *[95] * 13], [8, 9, *[95] * 14]]
    model = RetrievingModel(engine, same_for_all(source, 8), 1, 32)
    tokens = array("rope", "tokens")[0, :24].tolist()
    torch.testing.assert_close(
        by_token(model, tokens), whole(engine, tokens, source.repeat(3, 1)), rtol=1e-5, atol=1e-5
    )


def by_token(model: RetrievingModel, tokens: list[int]) -> torch.Tensor:
    """The logits after the sixth token and each further one, token by token."""
    found = [model.extend([Feed(0, 0, tuple(tokens[:6]))])]
    for place in range(6, len(tokens)):
        found.append(model.extend([Feed(0, place, (tokens[place],))]))
    return torch.cat(found)


def whole(engine: Engine, tokens: list[int], source: torch.Tensor) -> torch.Tensor:
    """The same logits of one pass. source: of all whole chunks."""
    row = torch.tensor([tokens])
    logits = engine.logits(Microbatch(row, row, source=source))
    assert logits is not None
    return logits[0, 5:]


def test_the_neighbors_of_each_chunk_are_searched_once_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier chunks keep their neighbors, so that the logits are those of one pass over the whole text."""
    pytest.importorskip("faiss")
    engine = make_engine(Case("rope"), trains=False)
    project = built(tmp_path / "project")
    searcher, database = open_searcher(project, TableEmbedder()), project.database(EOD)
    searched: list[int] = []
    search = Searcher.of_chunks

    def noted(self: Searcher, chunks: Any, count: int) -> Any:
        searched.append(len(chunks))
        return search(self, chunks, count)

    monkeypatch.setattr(Searcher, "of_chunks", noted)
    find = LiveSearch(searcher, database, engine.config.retrieval, engine.config.vocab)
    tokens = (array("rope", "tokens")[0, :24] % 63 + 1).tolist()
    found = by_token(RetrievingModel(engine, find, 1, 32), tokens)
    assert searched == [1, 1, 1]
    texts = [" ".join(map(str, tokens[start : start + 8])) for start in (0, 8, 16)]
    rows = searcher.neighbors(texts, 2)
    source = torch.from_numpy(database.retrieved(rows, 2).reshape(6, 16))
    assert torch.equal(find(tokens), source)
    torch.testing.assert_close(found, whole(engine, tokens, source), rtol=1e-5, atol=1e-5)


def test_a_project_of_another_vocabulary_or_without_an_embedder_is_not_searched(
    tmp_path: Path,
) -> None:
    pytest.importorskip("faiss")
    pytest.importorskip("h5py")
    project, retrieval = built(tmp_path / "project"), make_engine(Case("rope")).config.retrieval
    searcher = open_searcher(project, TableEmbedder())
    with pytest.raises(UsageError, match="is outside the model's vocabulary of 9"):
        LiveSearch(searcher, project.database(EOD), retrieval, 9)(range(8))
    of_megatron = open_project(megatrons_project(tmp_path / "megatron"))
    with pytest.raises(UsageError, match="only projects of `megatron-lite retro build` can be se"):
        open_searcher(of_megatron)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--retro-neighbors a --retro-project-dir P", "it excludes --retro-project-dir"),
        ("1 --retro-megatron-neighbors", "--retro-megatron-neighbors requires --retro-project-dir"),
    ],
)
def test_flags_of_neighbors_that_exclude_each_other_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_questions(parser().parse_args(["--load", "retro", *words.split()]))


@pytest.mark.parametrize(
    "line", ["no JSON", '{"prompt": "a"}', '{"prompt": "a", "neighbors": "b"}', '{"prompt": "a", "neighbors": []}']
)  # fmt: skip
def test_a_line_without_passages_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=r'asked.jsonl:1: expected \{"prompt": text, "neigh'):
        read_retrieved(str(tmp_path / "asked.jsonl"))
