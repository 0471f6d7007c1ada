"""The trainer saves to a store and goes on from it, with the bits of a run that saves to a disk."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from formats.stores.claim import Claim
from megaconv.engine.conversion import fingerprint
from megaconv.store_inputs import writable_store
from tests.runs import run
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Asked, SmallStore
from tests.trainer.data.corpus import some_lengths, write_corpus
from tests.trainer.loop.launches import LLAMA, launch, metrics

pytest.importorskip("torch")

from megatron_lite.checkpoint.rank_file import RankFile
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.store_saver import StoreSaver

URI = f"s3://{BUCKET}/run"


def trained(directory: Path, size: int, words: str, model: str = LLAMA) -> str:
    """Train 4 steps or more. Returns the log of rank 0. boto3 finds the store by the environment of this process."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prepare = partial(_point_at, kept)
    running = launch(directory, size, f"pretrain {model} {words}", prepare)
    assert running.wait() == [0] * size, running.logs()
    return running.log(0)


def _point_at(environment: dict[str, str], rank: int) -> None:
    os.environ.update(environment)


def files(place: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(1, "--async-save", marks=pytest.mark.slow),
        pytest.param(2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(
            2, "--ckpt-format torch --pipeline-model-parallel-size 2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_in_a_store_has_the_bytes_of_one_on_a_disk(
    writable: SmallStore, tmp_path: Path, size: int, words: str
) -> None:
    steps = "--train-iters 2 --save-interval 1 --keep-last 1"
    trained(tmp_path / "a", size, f"{steps} --save {URI} {words}")
    trained(tmp_path / "a", size, f"{steps} --train-iters 4 --save {URI} --resume {words}")
    trained(tmp_path / "b", size, f"{steps} --train-iters 4 --save ckpt {words}")
    found, expected = writable.below("run/"), files(tmp_path / "b" / "ckpt")
    assert found.keys() == expected.keys()
    for name, content in found.items():
        # The values that are not sharded contain the run's arguments, and so --save.
        assert content == expected[name] or name.endswith(("common.pt", "model_optim_rng.pt")), name
    assert not writable.uploads
    assert fingerprint(URI) == fingerprint(tmp_path / "b" / "ckpt")
    assert run("inspect", URI).status == 0


def test_the_tracker_is_written_last(writable: SmallStore, tmp_path: Path) -> None:
    """Whatever a reader sees before, the tracker points to nothing or to a complete iteration."""
    seen: list[set[str]] = []

    def note(asked: Asked) -> None:
        seen.append({key for key in writable.objects if ".megaconv-" not in key})

    writable.done = note  # type: ignore[assignment]
    trained(tmp_path, 1, f"--train-iters 2 --save {URI}")
    tracker = "run/latest_checkpointed_iteration.txt"
    first = next(keys for keys in seen if tracker in keys)
    assert {
        f"run/iter_0000002/{name}" for name in (".metadata", "common.pt", "__0_0.distcp")
    } <= first


def saver(tmp_path: Path, **values: Any) -> StoreSaver:
    """A saver of one process, which holds the claim."""
    store = writable_store(URI)
    claim = Claim(store, "run", "1.0")
    claim.take(replaces=False, foreign=())
    return StoreSaver(tmp_path, "torch", 0, None, {}, **values, store=store, prefix="run")


def test_a_save_takes_the_place_of_all_files_of_an_earlier_one(
    writable: SmallStore, tmp_path: Path
) -> None:
    """An earlier run may have saved the same iteration with another layout, or in another format."""
    earlier = ("mp_rank_00", "mp_rank_01/model_optim_rng.pt", "metadata.json", "__0_0.distcp")
    for name in earlier:
        writable.put(f"run/iter_0000003/{name}", b"earlier")
    writable.put("run/iter_0000002/mp_rank_01/model_optim_rng.pt", b"another iteration")
    file = RankFile("mp_rank_00/model_optim_rng.pt", {"iteration": 3}, ())
    saver(tmp_path).save(Snapshot(3, {}, rank_file=file))
    found = writable.below("run/iter_0000003/")
    assert list(found) == ["mp_rank_00/model_optim_rng.pt"]
    assert found.popitem()[1] != b"earlier"
    assert "run/iter_0000002/mp_rank_01/model_optim_rng.pt" in writable.objects


def test_only_iterations_are_removed_for_new_ones(writable: SmallStore, tmp_path: Path) -> None:
    kept = ["run/1", "run/2/notes.txt", "run/iter_1/notes.txt", "run/iter_²/notes.txt", "run/²"]
    for key in (*kept, "run/iter_0000001/a", "run/iter_0000002/a"):
        writable.put(key, b"content")
    file = RankFile("mp_rank_00/model_optim_rng.pt", {"iteration": 3}, ())
    saver(tmp_path, keep_last=1).save(Snapshot(3, {}, rank_file=file))
    left = [key for key in writable.all_keys() if ".megaconv-" not in key]
    assert left == sorted(
        [*kept, "run/iter_0000003/mp_rank_00/model_optim_rng.pt", "run/latest_checkpointed_iteration.txt"]
    )  # fmt: skip


def test_the_best_iteration_stays_in_a_store(writable: SmallStore, tmp_path: Path) -> None:
    kept = saver(tmp_path, keep_last=1)
    for iteration in (1, 2, 3):
        kept.best = min(iteration, 2)
        file = RankFile("mp_rank_00/model_optim_rng.pt", {"iteration": iteration}, ())
        kept.save(Snapshot(iteration, {}, rank_file=file))
    assert [kept.holds(iteration) for iteration in (1, 2, 3)] == [False, True, True]
    assert writable.objects["run/best_checkpointed_iteration.txt"].content == b"2"
    assert writable.objects["run/latest_checkpointed_iteration.txt"].content == b"3"


@pytest.mark.slow
def test_a_run_starts_from_weights_in_a_store(writable: SmallStore, tmp_path: Path) -> None:
    trained(tmp_path / "a", 1, f"--train-iters 2 --save {URI}")
    log = trained(
        tmp_path / "b", 1, f"--train-iters 2 --load {URI} --finetune --save s3://{BUCKET}/other"
    )
    assert "megaconv-" not in log
    assert "other/latest_checkpointed_iteration.txt" in writable.objects


@pytest.mark.slow
def test_ranks_train_on_data_in_a_store_as_on_local_data(
    writable: SmallStore, tmp_path: Path
) -> None:
    """Two data-parallel ranks, which share a cache, and a run that continues: the same losses to the last digit."""
    corpus = write_corpus(tmp_path / "text_document", some_lengths(200, 60, 5), vocab=50)
    for file in (corpus.with_suffix(".bin"), corpus.with_suffix(".idx")):
        writable.put(f"data/{file.name}", file.read_bytes())
    data = f"--data-path s3://{BUCKET}/data/text_document"
    cache = f"--split 9,1,0 --data-cache-path {tmp_path}/cache"
    model = LLAMA.replace("--mock-data ", "")
    trained(tmp_path / "a", 2, f"--train-iters 2 --save ckpt {data} {cache}", model)
    trained(tmp_path / "a", 2, f"--train-iters 4 --save ckpt --resume {data} {cache}", model)
    trained(tmp_path / "b", 2, f"--train-iters 4 --data-path {corpus} {cache}", model)
    expected = losses(tmp_path / "b")
    assert len(set(expected)) == 4
    assert losses(tmp_path / "a") == expected
    fetched = [each.key for each in writable.of("get")]
    assert sorted(fetched) == ["data/text_document.bin", "data/text_document.idx"]


def losses(directory: Path) -> list[object]:
    return [line["loss"] for line in metrics(directory)]
