"""Blocks and samples of the inverse cloze task are Megatron's; fixtures/blocks was made by its native helper and dataset."""

from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.blocks.mapping import Corpus, build_blocks
from megatron_lite.data.blocks.samples import Draw, Special, block_with_title, draw, ict_sample
from megatron_lite.data.indexed import IndexedDataset

FIXTURE = Path(__file__).parents[1] / "fixtures" / "blocks"
EXPECTED = np.load(FIXTURE / "expected.npz")
LENGTH, SEED, SPECIAL = 64, 1234, Special(cls=2, sep=3, pad=0)
SENTENCES = IndexedDataset(FIXTURE / "corpus_text_sentence")
TITLES = IndexedDataset(FIXTURE / "corpus_title_sentence")


def part(first: int, last: int, *, titles_of_megatron: bool = False) -> Corpus:
    """Documents from `first` up to but without `last`."""
    start = 0 if titles_of_megatron else first
    titles = TITLES.lengths[start : start + last - first].tolist()
    documents = SENTENCES.documents[first : last + 1]
    return Corpus(documents, SENTENCES.lengths, titles, start)


def bounds() -> list[int]:
    """The first document of each part of the split 80,15,5, and the end."""
    count = len(SENTENCES.documents) - 1
    ends = [round(count * share) for share in (0.8, 0.95)]
    return [0, *ends, count]


@pytest.mark.parametrize(
    ("number", "name", "samples"), [(0, "train", 80), (1, "valid", 20), (2, "test", 5)]
)
def test_blocks_are_those_of_megatron(number: int, name: str, samples: int) -> None:
    first, last = bounds()[number : number + 2]
    corpus = part(first, last, titles_of_megatron=True)
    found = build_blocks(corpus, samples, LENGTH, SEED)
    assert np.array_equal(found, EXPECTED[f"{name}/mapping"])


@pytest.mark.parametrize(("name", "least"), [("full", 2), ("full_one_sentence", 1)])
def test_one_epoch_of_a_corpus_is_megatrons(name: str, least: int) -> None:
    corpus = part(0, len(SENTENCES.documents) - 1)
    found = build_blocks(corpus, None, LENGTH, 1, least)
    assert np.array_equal(found, EXPECTED[f"{name}/mapping"])


def sentences_of(row: list[int]) -> list[list[int]]:
    first, end = row[:2]
    return [SENTENCES.get(sentence).tolist() for sentence in range(first, end)]


def test_samples_with_megatrons_draws_are_megatrons() -> None:
    draws = zip(EXPECTED["train/sentence"].tolist(), EXPECTED["train/keep"].tolist(), strict=True)
    for number, (row, drawn) in enumerate(
        zip(EXPECTED["train/mapping"].tolist(), draws, strict=True)
    ):
        title = TITLES.get(row[2]).tolist()
        sample = ict_sample(sentences_of(row), title, Draw(*drawn), LENGTH, SPECIAL)
        assert np.array_equal(sample.query, EXPECTED["train/query"][number])
        assert np.array_equal(sample.context, EXPECTED["train/context"][number])


def test_blocks_of_an_index_are_megatrons() -> None:
    for number, row in enumerate(EXPECTED["full/mapping"].tolist()):
        tokens = [token for sentence in sentences_of(row) for token in sentence]
        found = block_with_title(tokens, TITLES.get(row[2]).tolist(), LENGTH, SPECIAL)
        assert np.array_equal(found, EXPECTED["full/blocks"][number])


def test_validation_has_the_titles_of_its_own_documents() -> None:
    first, last = bounds()[1:3]
    found = build_blocks(part(first, last), None, LENGTH, SEED)
    starts = SENTENCES.documents
    for sentence, end, document, _ in found.tolist():
        assert first <= document < last
        assert starts[document] <= sentence < end <= starts[document + 1]


def test_draws_follow_from_the_seed_and_the_number() -> None:
    draws = [draw(5, 0.1, SEED, number) for number in range(2000)]
    assert draws == [draw(5, 0.1, SEED, number) for number in range(2000)]
    assert {drawn.sentence for drawn in draws} == set(range(5))
    assert 0.07 < sum(drawn.keeps for drawn in draws) / 2000 < 0.13
    assert draw(5, 0.1, 2**32 - 1, 1) == draw(5, 0.1, 0, 0)
