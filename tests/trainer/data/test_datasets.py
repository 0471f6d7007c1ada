"""Datasets and batches: every token is drawn, resumes and layouts see the same samples, the cache is safe, mistakes are reported."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import CheckpointError, CorruptCheckpoint
from megaconv.errors import LayoutError, UsageError
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.blend import blend_all, blend_by_weight, normalized
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.gpt_index import build_indices
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import NullTokenizer
from tests.trainer.data.corpus import VOCAB, some_lengths, write_corpus

TOKENIZER = NullTokenizer(VOCAB)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(
        tmp_path_factory.mktemp("corpus") / "text_document", some_lengths(200, 60, 5)
    )


def build(samples: tuple[int | None, ...] = (100, 10, 10), **options: Any) -> list[Dataset | None]:
    return build_datasets(DataOptions(**({"seq_length": 16} | options)), TOKENIZER, samples)


def train(corpus: Path, count: int | None = 100, **options: Any) -> Dataset:
    found = build((count, 0, 0), data_path=[str(corpus)], split="1", **options)[0]
    assert found is not None
    return found


# The indices.


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(any),
    st.integers(1, 25),
    st.none() | st.integers(1, 60),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_samples_lie_end_to_end_over_shuffled_documents(
    lengths: list[int], seq_length: int, samples: int | None, seed: int
) -> None:
    """Found by walking token by token, which is slow and plain."""
    sizes = np.array(lengths, np.int32)
    order, starts, shuffle = build_indices(
        sizes, np.arange(len(lengths), dtype=np.int32), seq_length, samples, seed
    )
    epochs = len(order) // len(lengths)
    assert np.bincount(order, minlength=len(lengths)).tolist() == [epochs] * len(lengths)
    tokens = [
        (entry, offset)
        for entry, document in enumerate(order)
        for offset in range(lengths[document])
    ]
    expected = tokens[0 : (len(tokens) - 1) // seq_length * seq_length + 1 : seq_length]
    assert [tuple(row) for row in starts[1:].tolist()] == expected[1:]
    assert starts[0].tolist() == [0, 0]
    assert sorted(shuffle.tolist()) == list(range(len(starts) - 1))
    if samples is not None:
        assert len(shuffle) >= samples
        assert epochs == 1 or (epochs - 1) * sum(lengths) < samples * seq_length + 1


def test_one_epoch_trains_on_every_token_but_the_first_and_the_rest(corpus: Path) -> None:
    data = IndexedDataset(corpus)
    stored = np.concatenate([data.get(number) for number in range(len(data))])
    dataset = train(corpus, None)
    drawn = np.concatenate([dataset[number].labels for number in range(len(dataset))])
    assert len(drawn) == (len(stored) - 1) // 16 * 16
    missing = np.bincount(stored, minlength=VOCAB + 1) - np.bincount(drawn, minlength=VOCAB + 1)
    assert missing.min() >= 0
    assert missing.sum() == len(stored) - len(drawn) <= 16


def test_labels_are_the_next_tokens(corpus: Path) -> None:
    sample = train(corpus)[3]
    assert np.array_equal(sample.tokens[1:], sample.labels[:-1])


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_a_blend_never_strays_from_its_weights_by_more_than_its_corpora(
    weights: list[float], size: int
) -> None:
    shares = normalized(weights)
    dataset, sample = blend_by_weight(shares, size)
    for number, share in enumerate(shares):
        taken = np.flatnonzero(dataset == number)
        assert sample[taken].tolist() == list(range(len(taken)))
        assert abs(len(taken) - share * size) <= len(weights)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_blend_of_all_has_every_sample_once(sizes: list[int]) -> None:
    dataset, sample = blend_all(sizes)
    expected = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    assert sorted(zip(dataset.tolist(), sample.tolist(), strict=True)) == expected


# Splits.


def test_an_empty_split_is_no_dataset(corpus: Path, tmp_path: Path) -> None:
    assert [found is None for found in build(data_path=[str(corpus)], split="99,1,0")] == [
        False,
        False,
        True,
    ]
    assert [
        found is None for found in build((5, 0, 5), data_path=[str(corpus)], split="98,1,1")
    ] == [False, True, False]
    tiny = write_corpus(tmp_path / "tiny", [40, 40, 0])
    assert [found is None for found in build(data_path=[str(tiny)], split="949,50,1")] == [
        False,
        True,
        True,
    ]
    nothing = write_corpus(tmp_path / "nothing", [])
    assert build(data_path=[str(nothing)], split="949,50,1") == [None, None, None]


def test_a_corpus_with_nothing_in_a_split_leaves_its_weight_to_the_others(
    corpus: Path, tmp_path: Path
) -> None:
    tiny = write_corpus(tmp_path / "tiny", [40, 40])
    with_tiny = build(data_path=["1", str(corpus), "1", str(tiny)], split="90,10,0")[1]
    alone = build(data_path=["1", str(corpus)], split="90,10,0")[1]
    assert with_tiny is not None
    assert alone is not None
    assert all(
        np.array_equal(with_tiny[number].tokens, alone[number].tokens) for number in range(10)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no training data is given"),
        ({"data_path": ["x"], "mock_data": True}, "exclude each other"),
        ({"data_path": ["x"], "train_data_path": ["x"]}, "in place of --data-path and --split"),
        (
            {"data_path": ["x"], "valid_data_path": ["x"]},
            "--valid-data-path can't be given beside it",
        ),
        (
            {"data_path": ["x"], "test_data_path": ["x"]},
            "--test-data-path can't be given beside it",
        ),
        (
            {"train_data_path": ["x"], "valid_data_path": ["x"], "split": "1,1,1"},
            "leave --split out",
        ),
        ({"train_data_path": ["x"], "split": "1"}, "--split"),
        ({"data_path": ["0.3", "a", "b", "c"]}, "'b' before c is not a weight"),
        ({"data_path": ["0.3", "a", "-1", "c"]}, "'-1' before c is not a weight"),
        ({"data_path": ["nan", "a", "1", "c"]}, "'nan' before a is not a weight"),
        ({"data_path": ["x"], "split": "1,1,1,1"}, "--split"),
        ({"data_path": ["x"], "split": "0,0"}, "--split"),
        ({"data_path": ["x"], "split": "90-10"}, "--split"),
        ({"data_path": ["x"], "seq_length": 0}, "--seq-length"),
    ],
    ids=str,
)
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(**options)


def test_weights_need_a_number_of_samples(corpus: Path) -> None:
    with pytest.raises(UsageError, match="number of samples"):
        build((None, 0, 0), data_path=["1", str(corpus)], split="1")


def test_a_corpus_that_is_not_there_is_named() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"nowhere\.idx: no such file"):
        build(data_path=["nowhere"])


# The cache.


def samples_of(dataset: Dataset | None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[number].tokens.tolist() for number in range(len(dataset))]


def test_the_cache_gives_the_same_samples_and_is_not_written_twice(
    corpus: Path, tmp_path: Path
) -> None:
    options = {"data_path": ["1", str(corpus), "2", str(corpus)], "split": "8,1,1"}
    plain = [samples_of(found) for found in build(**options)]
    cache = tmp_path / "cache"
    first = [samples_of(found) for found in build(**options, data_cache_path=cache)]
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    second = [samples_of(found) for found in build(**options, data_cache_path=cache)]
    assert plain == first == second
    assert files == {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"seq_length": 8}, {"split": "7,2,1"}, {"samples": (99, 10, 10)}]
)
def test_an_option_that_changes_the_order_never_uses_a_cached_index(
    corpus: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    options = {"data_path": [str(corpus)], "split": "8,1,1", "seed": 1}
    build(**options, data_cache_path=tmp_path)
    for found, expected in zip(
        build(**options | change, data_cache_path=tmp_path), build(**options | change), strict=True
    ):
        assert samples_of(found) == samples_of(expected)


def test_a_corpus_that_changes_at_its_place_is_not_read_with_old_indices(tmp_path: Path) -> None:
    for lengths in ([30, 40], [40, 30], [35, 35, 0]):
        for path in tmp_path.glob("x.*"):
            path.unlink()
        prefix = write_corpus(tmp_path / "x", lengths)
        assert samples_of(train(prefix, 9, data_cache_path=tmp_path / "cache")) == samples_of(
            train(prefix, 9)
        )


def test_a_damaged_cache_is_reported(corpus: Path, tmp_path: Path) -> None:
    train(corpus, data_cache_path=tmp_path)
    for path in tmp_path.rglob("sample.npy"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpoint, match="delete this directory"):
        train(corpus, data_cache_path=tmp_path)


def test_a_cache_that_cannot_be_written_is_reported(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="--data-cache-path"):
        train(corpus, data_cache_path=tmp_path / "file")


BUILD = """
import sys
from pathlib import Path
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.tokenizer import NullTokenizer
options = DataOptions(16, data_path=[sys.argv[1]], split="8,1,1", data_cache_path=Path(sys.argv[2]))
sys.stdin.readline()
found = build_datasets(options, NullTokenizer(1000), (500, 50, 50))
print([sum(int(each[number].tokens.sum()) * number for number in range(50)) for each in found])
"""


def test_processes_that_build_at_once_share_one_cache(corpus: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", BUILD, str(corpus), str(tmp_path)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert all(process.returncode == 0 for process in processes)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


# Batches.


def batches(dataset: Dataset, micro: int = 2, rank: int = 0, size: int = 1) -> GlobalBatches:
    return GlobalBatches(dataset, micro, rank, size, TOKENIZER.vocab_size)


def test_batches_are_tensors_of_micro_batches(corpus: Path) -> None:
    dataset = train(corpus)
    batch = batches(dataset).at(6, 4)
    assert batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape == (2, 2, 16)
    assert [batch[name].dtype for name in ("tokens", "position_ids", "loss_mask", "documents")] == [
        torch.int64, torch.int64, torch.float32, torch.int32,
    ]  # fmt: skip
    expected = np.stack([dataset[number].tokens for number in range(6, 10)])
    assert torch.equal(batch["tokens"].flatten(0, 1), torch.from_numpy(expected))


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (2, 3), (3, 2), (4, 1), (1, 12)])
def test_ranks_get_the_samples_of_megatrons_single_loader(
    corpus: Path, micro: int, size: int
) -> None:
    """Consecutive samples in chunks of micro · dp, of which each rank takes its part."""
    dataset, total = train(corpus), 48
    for rank in range(size):
        chunks = [
            range(start, start + micro * size) for start in range(24, 24 + total, micro * size)
        ]
        expected = [
            number for chunk in chunks for number in chunk[rank * micro : (rank + 1) * micro]
        ]
        loader = batches(dataset, micro, rank, size)
        assert loader.samples_at(24, 24) + loader.samples_at(48, 24) == expected


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_global_batch_has_the_same_samples_at_every_layout(
    consumed: int, micro: int, size: int, times: int
) -> None:
    count = micro * size * times
    shares = [
        GlobalBatches([], micro, rank, size, 1).samples_at(consumed, count) for rank in range(size)
    ]
    assert sorted(number for share in shares for number in share) == list(
        range(consumed, consumed + count)
    )


def test_a_resume_at_any_position_gives_the_batches_of_the_whole_run(corpus: Path) -> None:
    """The batch size grows during the run."""
    dataset, position, steps = train(corpus), 0, []
    for size in (2, 2, 4, 4, 8, 8, 8):
        steps.append((position, size))
        position += size
    whole = [
        (consumed, batch["tokens"].tolist())
        for consumed, batch in prefetch(batches(dataset), steps)
    ]
    assert [consumed for consumed, _ in whole] == [consumed for consumed, _ in steps]
    for first in range(len(steps)):
        again = train(corpus)
        resumed = [
            (consumed, batch["tokens"].tolist())
            for consumed, batch in prefetch(batches(again), steps[first:])
        ]
        assert resumed == whole[first:]


def test_batches_that_cannot_be_shared_evenly_are_refused(corpus: Path) -> None:
    with pytest.raises(LayoutError, match="multiple of 6"):
        batches(train(corpus), 2, 0, 3).at(0, 8)


def test_the_end_of_the_data_is_reported(corpus: Path) -> None:
    dataset = train(corpus)
    batches(dataset).at(len(dataset) - 2, 2)
    with pytest.raises(UsageError, match=f"the dataset has {len(dataset)}"):
        batches(dataset).at(len(dataset) - 1, 2)


def test_data_of_another_tokenizer_is_refused(corpus: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="another one"):
        GlobalBatches(train(corpus), 2, 0, 1, 500).at(0, 8)


def test_an_error_in_the_thread_arrives_where_the_batch_would(corpus: Path) -> None:
    arriving = prefetch(batches(train(corpus)), [(0, 2), (2, 3)])
    assert next(arriving)[0] == 0
    with pytest.raises(LayoutError, match="multiple of 2"):
        next(arriving)


def test_the_thread_ends_with_its_reader(corpus: Path) -> None:
    arriving = prefetch(batches(train(corpus)), ((0, 2) for _ in iter(int, 1)))
    next(arriving)
    assert any(thread.name == "prefetch" for thread in threading.enumerate())
    arriving.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.oracle
def test_megatron_core_refuses_a_split_beside_data_of_each_part_too() -> None:
    """`check_sources` therefore refuses no command line that Megatron accepts."""
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    make = config.BlendedMegatronDatasetConfig
    common = {"random_seed": 1, "sequence_length": 16, "path_to_cache": None}
    separate = [(["train"], None), (["valid"], None), None]
    with pytest.raises(AssertionError, match="blend and blend_per_split are incompatible"):
        make(blend=(["x"], None), blend_per_split=separate, **common)
    with pytest.raises(AssertionError, match="split and blend_per_split are incompatible"):
        make(split="95,5,0", blend_per_split=separate, **common)
    assert make(blend_per_split=separate, **common).split is None
