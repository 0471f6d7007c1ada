"""Every sample is the one that megatron-core's own classes draw: for seeds, splits, blends, epochs and resets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import NullTokenizer
from tests.trainer.data.corpus import VOCAB, some_lengths, write_corpus
from tests.trainer.data.megatron_tokenizers import null_tokenizer

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

S = 64


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """a and b hold some thousand samples of 64 tokens, c a few, d less than one."""
    root = tmp_path_factory.mktemp("corpora")
    return {
        "a": write_corpus(root / "a", some_lengths(3000, 300, 1), seed=1),
        "b": write_corpus(root / "b", some_lengths(1500, 200, 2), seed=2),
        "c": write_corpus(root / "c", some_lengths(30, 60, 3), seed=3),
        "d": write_corpus(root / "d", [0, 20, 0, 7], seed=4),
    }


def megatron(samples: tuple[int | None, ...], **options: Any) -> list[Any]:
    """The order of samples that megatron-core builds."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.datasets.utils import get_blend_from_list

    split_paths = [options.pop(f"{name}_data_path", None) for name in ("train", "valid", "test")]
    config = GPTDatasetConfig(
        random_seed=options.pop("seed", 1234),
        sequence_length=options.pop("seq_length", S),
        blend=get_blend_from_list(options.pop("data_path", None)),
        blend_per_split=[get_blend_from_list(words) for words in split_paths]
        if any(split_paths)
        else None,
        split=options.pop("split", None),
        tokenizer=null_tokenizer(VOCAB),
        reset_position_ids=options.pop("reset_position_ids", False),
        reset_attention_mask=options.pop("reset_attention_mask", False),
        eod_mask_loss=options.pop("eod_mask_loss", False),
    )
    kind = MockGPTDataset if options.pop("mock_data", False) else GPTDataset
    assert not options
    built: list[Any] = BlendedMegatronDatasetBuilder(
        kind, list(samples), lambda: True, config
    ).build()
    return built


def ours(samples: tuple[int | None, ...], **options: Any) -> list[Dataset | None]:
    return build_datasets(
        DataOptions(**({"seq_length": S} | options)), NullTokenizer(VOCAB), samples
    )


def assert_same(mine: Dataset | None, real: Any, most: int = 1_000) -> None:
    """Tokens of the first samples, and all that belongs to the first 30."""
    if mine is None:
        assert real is None or len(real) == 0
        return
    assert len(mine) == len(real)
    for number in range(min(most, len(mine))):
        sample = mine[number]
        assert np.array_equal(np.append(sample.tokens, sample.labels[-1]), window(real, number)), (
            number
        )
    for number in range(min(30, len(mine))):
        sample, expected = mine[number], real[number]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(getattr(sample, name), expected[name].numpy()), (number, name)
        hidden = expected["attention_mask"][0].numpy()
        assert np.array_equal(hidden, ~visible(sample.documents)), number


def window(real: Any, number: int) -> np.ndarray[Any, Any]:
    """A sample's tokens and the one behind, without the tensors that Megatron makes of them."""
    if hasattr(real, "datasets"):
        return window(real.datasets[real.dataset_index[number]], real.dataset_sample_index[number])
    tokens: np.ndarray[Any, Any] = real._query_document_sample_shuffle_indices(number)[0]
    return tokens


def visible(documents: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bool[s, s]: whether the token of a row sees the one of a column."""
    return np.tril(documents[:, None] == documents[None, :])


def compare(samples: tuple[int | None, ...], most: int = 1_000, **options: Any) -> None:
    for mine, real in zip(ours(samples, **options), megatron(samples, **options), strict=True):
        assert_same(mine, real, most)


def test_the_first_ten_thousand_samples_of_several_epochs_are_megatrons(
    corpora: dict[str, Path],
) -> None:
    compare((10_000, 100, 10), 10_000, data_path=[str(corpora["b"])], split="949,50,1")


@pytest.mark.parametrize("seed", [1, 1234, 987654])
@pytest.mark.parametrize(
    ("split", "samples"),
    [
        ("949,50,1", (1000, 20, None)),
        ("8,1,1", (40, 40, 40)),
        ("1", (300, 0, 0)),
        ("0.5, 0, .5", (90, 0, 7)),
    ],
)
def test_single_corpora(
    corpora: dict[str, Path], seed: int, split: str, samples: tuple[int | None, ...]
) -> None:
    compare(samples, data_path=[str(corpora["c"])], split=split, seed=seed)


def test_one_epoch(corpora: dict[str, Path]) -> None:
    compare((None, None, None), data_path=[str(corpora["a"])], split="90,5,5")


@pytest.mark.parametrize("samples", [13, 14, 15, 16, 17, 18, 19, 20, 27, 28, 29, 30])
def test_the_last_epoch_is_shuffled_for_itself_when_little_of_it_is_drawn(
    corpora: dict[str, Path], samples: int
) -> None:
    """About 14 samples an epoch: the numbers go over the bound of 80 % of the last one."""
    compare((samples, 0, 0), data_path=[str(corpora["c"])], split="1,0,0")


def test_a_corpus_shorter_than_a_sample_is_repeated(corpora: dict[str, Path]) -> None:
    compare((50, 0, 0), data_path=[str(corpora["d"])], split="1,0,0")


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["0.3", "a", "0.7", "b"], (5000, 100, 10)),
        (["30", "a", "69", "b", "1", "c"], (4001, 333, 5)),
        (["1", "a", "1", "b", "1", "c"], (900, 30, 3)),
        (["2.5", "a"], (500, 10, 5)),
        (["a", "b"], (1500, 10, 5)),
        (["a", "b"], (None, None, None)),
    ],
    ids=str,
)
def test_blends(
    corpora: dict[str, Path], words: list[str], samples: tuple[int | None, ...]
) -> None:
    paths = [str(corpora.get(word, word)) for word in words]
    compare(samples, data_path=paths, split="900,70,30")


@pytest.mark.parametrize("size", [None, 400, 10**6])
def test_blends_without_weights_take_each_corpus_once(
    corpora: dict[str, Path], size: int | None
) -> None:
    compare((size, 0, 0), data_path=[str(corpora[name]) for name in "cab"], split="1,0,0")


def test_paths_for_each_split(corpora: dict[str, Path]) -> None:
    a, b, c = (str(corpora[name]) for name in "abc")
    compare((700, 100, 0), train_data_path=["3", a, "1", b], valid_data_path=["1", c])


@pytest.mark.parametrize(
    "flags",
    [
        {"eod_mask_loss": True},
        {"reset_position_ids": True},
        {"reset_attention_mask": True},
        {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True},
    ],
    ids=lambda flags: "+".join(flags),
)
def test_ends_of_documents_reset_what_the_flags_say(
    corpora: dict[str, Path], flags: dict[str, bool]
) -> None:
    compare((200, 20, 0), data_path=[str(corpora["c"])], split="80,20,0", **flags)


def test_mock_data() -> None:
    compare((500, 20, 5), 200, mock_data=True)
