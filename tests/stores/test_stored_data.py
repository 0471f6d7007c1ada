"""Training data in a store: the samples are those of local files, and the cache on disk stays within its bound."""

import os
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data import block_cache, stored
from megatron_lite.data.block_cache import Block, BlockCache
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.stored import DataCache
from megatron_lite.data.tokenizer import NullTokenizer
from tests.stores.conftest import BUCKET, plain_client, put
from tests.stores.proxy import Fault, Proxy
from tests.stores.small_store import SmallStore
from tests.trainer.data.corpus import VOCAB, some_lengths, write_corpus

BLOCK = 4096
forked_processes = partial(ProcessPoolExecutor, mp_context=get_context("fork"))
OBJECT = bytes(16)
ROOM = 1 << 30


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of about 6 blocks."""
    for module in ("block_cache", "stored"):
        monkeypatch.setattr(f"megatron_lite.data.{module}.BLOCK_BYTES", BLOCK)
    (tmp_path / "data").mkdir()
    return write_corpus(tmp_path / "data" / "text_document", some_lengths(60, 400, 5))


def samples(prefix: object, **options: Any) -> list[Any]:
    made = DataOptions(seq_length=64, data_path=[str(prefix)], split="8,1,1", **options)
    training = build_datasets(made, NullTokenizer(VOCAB), (60, 5, 5))[0]
    assert training is not None
    return [training[number].tokens.tolist() for number in range(60)]  # type: ignore[attr-defined]


def test_samples_of_a_store_are_those_of_local_files(
    store: Proxy, corpus: Path, tmp_path: Path
) -> None:
    put(store, corpus.parent, "data")
    uri, cache = f"s3://{BUCKET}/data/text_document", tmp_path / "cache"
    assert samples(uri, data_cache_path=cache) == samples(corpus)
    size = corpus.with_suffix(".bin").stat().st_size
    spans = [each.span for each in store.requests if each.key.endswith(".bin") and each.span]
    assert len(spans) <= -(-size // BLOCK)
    assert len(set(spans)) == len(spans), "a block was fetched twice"
    store.reset()
    assert samples(uri, data_cache_path=cache) == samples(corpus)
    assert not [each for each in store.requests if each.method == "GET"], "the cache was not used"


def test_a_cache_that_is_too_small_changes_no_sample(
    writable: SmallStore, corpus: Path, tmp_path: Path
) -> None:
    for file in corpus.parent.iterdir():
        writable.put(f"data/{file.name}", file.read_bytes())
    uri, cache = f"s3://{BUCKET}/data/text_document", tmp_path / "cache"
    nbytes = 3 * (BLOCK + 64)
    found = samples(uri, data_cache_path=cache, data_cache_bytes=nbytes)
    assert found == samples(corpus)
    assert (cache / "blocks.cache").stat().st_size <= 4096 + 3 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault("status", 503, "SlowDown"), Fault("half"), Fault("reset")])
def test_requests_for_data_are_repeated(
    store: Proxy, corpus: Path, tmp_path: Path, fault: Fault
) -> None:
    put(store, corpus.parent, "data")
    store.faults = lambda number, method, key: fault if number % 2 else None
    uri = f"s3://{BUCKET}/data/text_document"
    assert samples(uri, data_cache_path=tmp_path / "cache") == samples(corpus)


def test_a_corpus_that_is_replaced_ends_the_run(store: Proxy, corpus: Path, tmp_path: Path) -> None:
    put(store, corpus.parent, "data")
    cache = DataCache(tmp_path / "cache", ROOM)
    dataset = cache.dataset(f"s3://{BUCKET}/data/text_document")
    content = corpus.with_suffix(".bin").read_bytes()
    plain_client(store).put_object(Bucket=BUCKET, Key="data/text_document.bin", Body=content[::-1])
    with pytest.raises(CorruptCheckpoint, match="replaced or deleted"):
        [dataset.get(number) for number in range(len(dataset))]


def test_missing_data_in_a_store_is_named(
    writable: SmallStore, corpus: Path, tmp_path: Path
) -> None:
    uri = f"s3://{BUCKET}/data/text_document"
    with pytest.raises(UsageError, match="give --data-cache-path"):
        DataCache(None, ROOM).dataset(uri)
    with pytest.raises(
        CorruptCheckpoint, match=r"s3://models/data/text_document.idx: no such object"
    ):
        DataCache(tmp_path / "cache", ROOM).dataset(uri)
    writable.put("data/text_document.idx", corpus.with_suffix(".idx").read_bytes())
    writable.put("data/text_document.bin", corpus.with_suffix(".bin").read_bytes()[:-2])
    with pytest.raises(CorruptCheckpoint, match=r"s3://models/data/text_document.bin: has"):
        DataCache(tmp_path / "cache", ROOM).dataset(uri)
    with pytest.raises(UsageError, match="is a URI"):
        DataCache(tmp_path, ROOM).dataset("https://example.com/corpus")


def test_a_damaged_block_counts_as_missing(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 3 * (block_cache.BLOCK_BYTES + 64))
    block, content = Block(OBJECT, 7), b"tokens" * 1000
    assert cache.read(block) is None
    cache.write(block, content)
    assert cache.read(block) == content
    assert cache.read(Block(OBJECT, 8)) is None
    file = tmp_path / "blocks.cache"
    file.write_bytes(file.read_bytes().replace(b"tokens", b"Tokens", 1))
    assert cache.read(block) is None
    cache.write(block, content)
    assert cache.read(block) == content


def test_an_entry_of_another_block_finds_nothing(tmp_path: Path) -> None:
    """A torn write of an entry can join one block's number with another block's digest, which fits the content."""
    cache = BlockCache(tmp_path, block_cache.BLOCK_BYTES + 64)
    cache.write(Block(OBJECT, 7), b"tokens of block 7")
    file = tmp_path / "blocks.cache"
    seven, eight = (OBJECT + number.to_bytes(8, "little") for number in (7, 8))
    content = file.read_bytes()
    assert content.count(seven) == 1
    file.write_bytes(content.replace(seven, eight))
    assert cache.read(Block(OBJECT, 8)) is None


def test_an_index_is_complete_even_if_the_disk_takes_a_few_bytes_at_a_time(
    writable: SmallStore, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in corpus.parent.iterdir():
        writable.put(f"data/{file.name}", file.read_bytes())
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: whole(file, data[:100], at))
    DataCache(tmp_path / "cache", ROOM).dataset(f"s3://{BUCKET}/data/text_document")
    [index] = (tmp_path / "cache").glob("*.idx")
    assert index.read_bytes() == corpus.with_suffix(".idx").read_bytes()


def test_all_datasets_of_a_run_share_the_blocks_in_memory(
    writable: SmallStore, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_HOT_BLOCKS", 3)
    cache = DataCache(tmp_path / "cache", ROOM)
    for name in ("a", "b"):
        for file in corpus.parent.iterdir():
            writable.put(f"{name}/{file.name}", file.read_bytes())
        dataset = cache.dataset(f"s3://{BUCKET}/{name}/text_document")
        for number in range(len(dataset)):
            dataset.get(number)
    assert len(cache._hot._blocks) == 3
    assert corpus.with_suffix(".bin").stat().st_size > 3 * BLOCK


def hits_of_random_blocks(directory: Path, seed: int) -> int:
    """Read 300 of 20 blocks, and write those that are missing. Returns the number of hits; fails for a wrong one."""
    cache, dice = BlockCache(directory, 2 * (BLOCK + 64)), np.random.default_rng(seed)
    hits = 0
    for number in dice.integers(0, 20, 300).tolist():
        block, content = Block(OBJECT, number), bytes([number]) * BLOCK
        found = cache.read(block)
        if found is None:
            cache.write(block, content)
        else:
            assert found == content, number
            hits += 1
    return hits


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, forked_processes])
def test_those_who_share_a_cache_see_only_complete_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Callable[[int], Executor]
) -> None:
    """Two or more writers with a cache each, in one file with room for 2 of 20 blocks."""
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", BLOCK)
    with pool(4 if pool is ThreadPoolExecutor else 2) as running:
        hits = list(running.map(hits_of_random_blocks, repeat(tmp_path), range(4)))
    # One of ten reads finds its block if nobody else writes.
    assert min(hits) > 0
    assert sum(hits) > 40


def test_threads_may_make_a_cache_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            list(pool.map(BlockCache, repeat(tmp_path / str(number), 4), repeat(2 << 20)))


def test_a_cache_of_another_size_is_made_anew(tmp_path: Path) -> None:
    BlockCache(tmp_path, 2 << 20).write(Block(OBJECT, 1), b"content")
    assert BlockCache(tmp_path, 2 << 20).read(Block(OBJECT, 1)) == b"content"
    assert BlockCache(tmp_path, 4 << 20).read(Block(OBJECT, 1)) is None


def test_local_files_are_still_mapped(corpus: Path) -> None:
    dataset = IndexedDataset(corpus)
    tokens = dataset.get(0)
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable
