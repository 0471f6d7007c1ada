"""The hash by which a continued run tells that its data changed, of each kind of training data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megatron_lite.data.tasks.examples import Example, Read
from megatron_lite.data.tasks.passages import Passage, Question
from megatron_lite.objectives.answers import TASKS, AnswerData
from megatron_lite.objectives.blocks import titles_by_corpus
from megatron_lite.objectives.corpus import Corpus
from megatron_lite.objectives.passages import PassageData
from megatron_lite.objectives.prompts import Prompt, PromptData
from megatron_lite.objectives.training_data import Setup
from megatron_lite.retrieval.retro.project import open_project
from megatron_lite.settings.arguments import parse
from tests.trainer.data.corpus import write_documents
from tests.trainer.retrieval.retro_fixture import QUERIES, megatrons_project

ANY = cast("Setup", None)
"""For data whose hash depends on no setting."""
SENTENCES = [[[1, 2], [3]], [[4, 5, 6]]]
TITLES = [[[7]], [[8, 9]]]


@dataclass
class Place:
    """A directory with a corpus of sentences and its titles."""

    directory: Path
    written: int = 0

    def identity(self, sentences: Sequence[Any], titles: Sequence[Any] | None = None) -> str | None:
        """The hash of these documents; of blocks with these titles, or of masked words if there are none."""
        self.written += 1
        text, title = (str(self.directory / f"{name}{self.written}") for name in ("text", "title"))
        words = ["--data-path", text, "--titles-data-path", title]
        settings, _ = parse("pretrain", words)
        write_documents(Path(text), sentences)
        beside = {}
        if titles is not None:
            write_documents(Path(title), titles)
            beside = titles_by_corpus(settings)
        setup = SimpleNamespace(settings=settings, sizes=SimpleNamespace(seq=16))
        return Corpus(lambda _: None, beside).identity(cast("Setup", setup))


def test_sentences_and_the_documents_that_they_make_up_count(tmp_path: Path) -> None:
    place = Place(tmp_path)
    before = place.identity(SENTENCES)
    assert place.identity(SENTENCES) == before
    assert place.identity([[[1, 2], [3]], [[4, 5]]]) != before
    assert place.identity([[[1, 2]], [[3], [4, 5, 6]]]) != before


def test_titles_of_blocks_count(tmp_path: Path) -> None:
    place = Place(tmp_path)
    before = place.identity(SENTENCES, TITLES)
    assert place.identity(SENTENCES, TITLES) == before
    assert place.identity(SENTENCES, [[[7, 7]], [[8, 9]]]) != before


def test_prompts_and_the_columns_of_rewards_count() -> None:
    def identity(*prompts: tuple[tuple[int, ...], Any]) -> str:
        made = [
            Prompt("file:1", "text", np.array(ids), {"answer": answer}) for ids, answer in prompts
        ]
        return PromptData(made, [], [], 8, 4).identity(ANY)

    before = identity(((1, 2), "4"), ((3,), "5"))
    assert identity(((1, 2), "4"), ((3,), "5")) == before
    assert identity(((1, 2), "4"), ((3, 3), "5")) != before
    assert identity(((1, 2), "4"), ((3,), "6")) != before
    assert identity(((3,), "5"), ((1, 2), "4")) != before


def test_examples_of_tasks_and_questions_count() -> None:
    def answers(label: int) -> str:
        read = Read([Example(("a",), "b", label)])
        return AnswerData(TASKS["MNLI"], {"train": read}, {}).identity(ANY)

    def passages(text: str) -> str:
        question = Question("who", Passage("title", text), (), ())
        return PassageData([question], []).identity(ANY)

    assert answers(0) == answers(0) != answers(1)
    assert passages("a") == passages("a") != passages("b")


def test_neighbors_and_chunks_of_a_retro_project_count(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    place = megatrons_project(tmp_path / "P")

    def identities() -> list[str]:
        return [
            open_project(place).identity("train", with_neighbors=each) for each in (True, False)
        ]

    def change(file: Path, array: str) -> None:
        with h5py.File(file, "r+") as opened:
            opened[array][...] = np.roll(opened[array][...], 1, axis=0)

    before, without = identities()
    assert identities() == [before, without]
    queries = {
        split: min((place / "query" / str(QUERIES[split])).iterdir())
        for split in ("train", "valid")
    }
    change(queries["train"], "neighbors")
    rebuilt, still = identities()
    assert rebuilt != before
    assert still == without
    change(queries["valid"], "neighbors")
    assert identities() == [rebuilt, without]
    change(place / "db" / "merged" / "train.hdf5", "chunks")
    assert identities()[0] != rebuilt
    (place / "config.json").write_text((place / "config.json").read_text() + "\n")
    assert identities()[1] != without
