"""Samples of BERT and T5 are those of megatron-core, array for array; fixtures/masked was made by its own data sets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaconv.errors import UsageError
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.masked.mapping import build_mapping, mt19937_64
from megatron_lite.data.masked.masking import Masking
from megatron_lite.data.masked.samples import Vocabulary, bert_sample, t5_sample

FIXTURE = Path(__file__).parents[1] / "fixtures" / "masked"
INFO = json.loads((FIXTURE / "info.json").read_text())
EXPECTED = np.load(FIXTURE / "expected.npz")
SPLITS = {"train": 0, "valid": 1, "test": 2}
CASES = [(case, split) for case in INFO["cases"] for split in SPLITS]


def vocabulary(kind: str) -> Vocabulary:
    words = (FIXTURE / "vocab.txt").read_text().splitlines()
    special = INFO["tokenizer"]
    first, last = special["sentinels"]
    if kind == "bert":
        words = words[:first]
    continues = np.array([word.startswith("##") for word in words])
    names = {name: special[name] for name in ("cls", "sep", "mask", "pad", "bos", "eos")}
    return Vocabulary(len(words), continues, **names, sentinels=range(first, last + 1))


def mapping_of(case: str, split: str, data: IndexedDataset) -> np.ndarray[Any, Any]:
    settings, kind = INFO["cases"][case]["settings"], INFO["cases"][case]["kind"]
    documents = EXPECTED[f"{case}/{split}/documents"]
    taken = 3 if kind == "bert" else 2
    least = 2 if settings.get("classification_head") else 1
    return build_mapping(
        data.documents[np.append(documents, documents[-1] + 1)], data.lengths, INFO["num_samples"][SPLITS[split]],
        settings["sequence_length"] - taken, settings["short_sequence_probability"], INFO["random_seed"], least,
    )  # fmt: skip


@pytest.mark.parametrize(("case", "split"), CASES)
def test_samples_are_those_of_megatron_core(case: str, split: str) -> None:
    data = IndexedDataset(FIXTURE / "corpus_text_sentence")
    settings, kind = INFO["cases"][case]["settings"], INFO["cases"][case]["kind"]
    mapping = mapping_of(case, split, data)
    assert np.array_equal(mapping, EXPECTED[f"{case}/{split}/sample_index"])
    words, length = vocabulary(kind), settings["sequence_length"]
    masking = Masking(
        settings["masking_probability"], settings["masking_max_ngram"], settings["masking_do_full_word"],
        settings["masking_use_longer_ngrams"], settings["masking_use_geometric_distribution"],
    )  # fmt: skip
    listed = len(EXPECTED[f"{case}/{split}/truncated"])
    for number, (first, last, longest) in enumerate(mapping[:listed].tolist()):
        sentences = [data.get(sentence).tolist() for sentence in range(first, last)]
        seed = INFO["random_seed"] + number
        made: Any
        if kind == "bert":
            made = bert_sample(
                sentences,
                longest,
                length,
                seed,
                masking,
                words,
                two_parts=settings["classification_head"],
            )
        else:
            made = t5_sample(
                sentences, longest, length, settings["sequence_length_decoder"], seed, masking, words
            )  # fmt: skip
        for name, found in made._asdict().items():
            expected = EXPECTED[f"{case}/{split}/{name}"][number]
            assert np.array_equal(found, expected), f"{name} of sample {number}"


def test_the_64_bit_twister_is_the_standards() -> None:
    """ISO C++ states the 10000th number of the default seed."""
    random = mt19937_64(5489)
    for _ in range(9999):
        next(random)
    assert next(random) == 9981545732273789042


def test_a_masked_sample_that_does_not_fit_names_the_flag() -> None:
    words = vocabulary("t5")
    few = Vocabulary(words.words, words.continues, 2, 3, 4, 0, 5, 6, sentinels=range(129, 131))
    sentences = [list(range(30, 60))]
    many = Masking(0.5, 1, use_geometric_distribution=True)
    with pytest.raises(UsageError, match=r"--vocab-extra-ids must be [0-9]+ or more"):
        t5_sample(sentences, 30, 40, 40, 1, many, few)
    with pytest.raises(
        UsageError, match="the decoder has room for 7; give a longer --decoder-seq-length"
    ):
        t5_sample(sentences, 30, 40, 8, 1, Masking(0.5, 3), words)


def test_a_part_without_any_sample_ends() -> None:
    lengths = np.array([600, 5], np.int32)
    assert build_mapping(np.array([0, 2]), lengths, 10, 20, 0.1, 1, 2).shape == (0, 3)
