"""A build makes the arrays that megatron-core 0.15.3's preprocessing made from the same corpus."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.retrieval.hash_embedder import HashEmbedder
from megatron_lite.retrieval.retro.block_tasks import NotReproduced
from megatron_lite.retrieval.retro.build import TASKS, BuildRequest, build, tasks_of
from megatron_lite.retrieval.retro.plan import IndexPlan
from megatron_lite.retrieval.retro.project import Project, open_project
from megatron_lite.retrieval.retro.project_settings import ProjectSettings
from megatron_lite.retrieval.retro.searching import open_searcher
from megatron_lite.retrieval.team import Team
from tests.trainer.retrieval.retro_fixture import EOD, FIXTURE, INFO, expected

pytest.importorskip("faiss")
pytest.importorskip("h5py")

ALONE = Team(0, 1)
VECTORS: NDArray[np.float32] = np.load(FIXTURE / "table.npy").astype(np.float32)


class TableEmbedder:
    """The fixture's embedder: the sum of the words' vectors. Words are written as their numbers."""

    name = "table"
    fingerprint = "table"
    width = int(INFO["dim"])

    def embed(self, texts: Any) -> NDArray[np.float32]:
        sums = np.stack([VECTORS[list(map(int, text.split()))].sum(0) for text in texts])
        lengths: NDArray[np.float32] = np.linalg.norm(sums, axis=1, keepdims=True)
        return sums / lengths

    def count(self, text: str) -> int:
        return sum(int(word) not in INFO["blank"] for word in text.split())


@pytest.fixture(autouse=True)
def first_word_ends_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let token 0 end documents, as in the fixture. A NullTokenizer has its own token for that."""
    monkeypatch.setattr(Project, "eod", lambda self, tokenizer=None: EOD)


def request(directory: Path, **changes: Any) -> BuildRequest:
    """The fixture's build. changes: of any of its settings."""
    settings: dict[str, Any] = {
        "seq_length": INFO["seq_length"],
        "chunk_length": INFO["chunk_length"],
        "data_path": ("0.7", str(FIXTURE / "data/a"), "0.3", str(FIXTURE / "data/b")),
        "split": INFO["split"],
        "seed": INFO["seed"],
        "block_size": INFO["block_size"],
        "global_batch_size": 8,
        "train_samples": INFO["samples"]["train"],
        "eval_interval": 100,
        "eval_iters": 1,
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 64},
        "own": {"format": changes.pop("format", "numpy")},
    }
    index = {
        "text": "Flat",
        "train_chunks": INFO["ntrain"],
        "nprobe": INFO["nprobe"],
        "query": INFO["num_neighbors_query"],
        "save": INFO["num_neighbors_save"],
    }
    more = {"document_block": INFO["doc_block_size"], "tasks": TASKS, "validate": None}
    for name, value in changes.items():
        (settings if name in settings else index if name in index else more)[name] = value
    return BuildRequest(directory, ProjectSettings(**settings), IndexPlan(**index), **more)


def built(directory: Path, **changes: Any) -> Project:
    build(request(directory, **changes), TableEmbedder(), ALONE)
    return open_project(directory)


@pytest.fixture(scope="module", params=["numpy", "megatron"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Project, "eod", lambda self, tokenizer=None: EOD)
        return built(tmp_path_factory.mktemp("built") / "project", format=request.param)


def test_the_database_is_megatrons(project: Project) -> None:
    wanted = expected()
    for part in ("sampled", "train", "valid"):
        assert_array_equal(project.database(EOD, part).chunks, wanted[f"db/{part}"])
    stem = project.path / "db" / "merged" / "train"
    assert_array_equal(project.files.read(stem, "doc_offsets"), wanted["db/doc_offsets"])
    infos = json.loads((FIXTURE / "db" / "indexed_dataset_infos.json").read_text(encoding="utf-8"))
    assert project.infos() == infos


@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_neighbours_are_megatrons(project: Project, split: str) -> None:
    near = project.neighbors(split)
    assert near is not None
    rows = np.concatenate([near.of_sample(sample, near.saved) for sample in range(len(near))])
    assert_array_equal(rows, expected()[f"neighbors/{split}"])


def test_files_of_the_megatron_format_are_those_of_core(tmp_path: Path) -> None:
    """Arrays, dtypes, shapes and file names of the files that the fixture has."""
    import h5py

    project = built(tmp_path / "project", format="megatron")
    files = sorted((FIXTURE / "project" / "db").rglob("*.hdf5"))
    assert files
    for theirs in files:
        ours = project.path / "db" / theirs.relative_to(FIXTURE / "project" / "db")
        with h5py.File(theirs) as one, h5py.File(ours) as other:
            assert set(one) == set(other)
            for name in one:
                assert one[name].dtype == other[name].dtype
                assert_array_equal(one[name][()], other[name][()])


@pytest.mark.parametrize("text", ["IVF8_HNSW4,Flat", "OPQ4_16,IVF8_HNSW4,PQ4x4", "HNSW8,Flat"])
def test_an_index_is_built_by_its_string(text: str, tmp_path: Path) -> None:
    """An exhaustive search of exact vectors finds Megatron's neighbours; codes and graphs find some."""
    near = built(tmp_path / "project", text=text, train_chunks=400).neighbors("train")
    assert near is not None
    rows = np.concatenate([near.of_sample(sample, near.saved) for sample in range(len(near))])
    same = float(np.mean(rows == expected()["neighbors/train"]))
    assert same == 1 if text == "IVF8_HNSW4,Flat" else same > 0.2


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_an_ended_build_goes_on_with_the_missing_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends in the middle of each task; at the end all files have the bytes of an uninterrupted build."""
    whole = built(tmp_path / "whole", block_size=50)
    calls, embed = [0], TableEmbedder.embed

    def fails(self: TableEmbedder, texts: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        return embed(self, texts)

    monkeypatch.setattr(TableEmbedder, "embed", fails)
    ended = 0
    for _ in range(20):
        try:
            built(tmp_path / "ended", block_size=50)
        except KeyboardInterrupt:
            ended += 1
        else:
            break
    assert ended > 2
    assert contents(whole.path) == contents(tmp_path / "ended")


def test_blocks_are_computed_again_and_compared(tmp_path: Path) -> None:
    project = built(tmp_path / "project")
    built(project.path, validate=1.0)
    path = next(project.path.glob("query/train/*.npy"))
    path.write_bytes(path.read_bytes()[:-8] + (7).to_bytes(8, "little"))
    with pytest.raises(NotReproduced, match="differs from what this build makes"):
        built(project.path, validate=1.0)


def test_changed_data_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(FIXTURE / "data", data)
    words = ("0.7", str(data / "a"), "0.3", str(data / "b"))
    project = built(tmp_path / "project", data_path=words)
    project.check_data()
    shutil.copy(data / "b.bin", data / "a.bin")
    shutil.copy(data / "b.idx", data / "a.idx")
    with pytest.raises(UsageError, match="changed since the project was built"):
        project.check_data()


def test_datasets_in_the_project_are_found_by_their_names(tmp_path: Path) -> None:
    """The names are Megatron's."""
    shutil.copytree(FIXTURE / "data", tmp_path / "project" / "data")
    project = built(tmp_path / "project", data_path=("0.7", "a", "0.3", "b"), tasks=("db-build",))
    assert_array_equal(project.database(EOD).chunks, expected()["db/train"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 30}, "not a whole number of chunks of 8"),
        ({"split": "0,80,20"}, "its first share is 0"),
        ({"train_chunks": 5000}, "takes 3,500 chunks of a, which has 282"),
        ({"text": "Flt"}, "faiss refuses it: could not parse index string Flt"),
        ({"text": "IVF4096,Flat"}, "trained with 150 vectors: faiss refuses it"),
        ({"text": "PQ4x12"}, "trained with 150 vectors: faiss refuses it"),
        ({"save": 6}, "only 5 are searched"),
        ({"validate": 2.0}, "more than 0, at most 1"),
        ({"data_path": (str(FIXTURE / "data/c"),)}, "no such file"),
    ],
)
def test_wrong_flags_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, CorruptCheckpoint), match=message):
        built(tmp_path / "project", **changes)


def test_a_project_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    built(tmp_path / "project", tasks=("db-build",))
    with pytest.raises(UsageError, match="was begun with seed 1234, not 7"):
        built(tmp_path / "project", seed=7)
    with pytest.raises(UsageError, match="was begun with index 'Flat', not 'IVF8,Flat'"):
        built(tmp_path / "project", text="IVF8,Flat")


def test_tasks_have_megatrons_names() -> None:
    assert tasks_of("build") == TASKS
    assert tasks_of("query-neighbors,index-build") == TASKS[1:]
    with pytest.raises(UsageError, match="there are build, index-build, db-build"):
        tasks_of("buld")


def test_equal_words_have_equal_vectors() -> None:
    embedder = HashEmbedder(32)
    one, same, other, none = embedder.embed(["b a", "a b", "a c", ""])
    assert_array_equal(one, same)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert float(one @ other) < 0.9
    assert not none.any()


@pytest.mark.parametrize("text", ["Flat", "IVF8_HNSW4,Flat"])
def test_any_text_finds_its_chunk(text: str, tmp_path: Path) -> None:
    """The index is mapped; the nearest chunk of a chunk's text is the chunk itself, or one with the same words."""
    project = built(tmp_path / "project", text=text)
    searcher = open_searcher(project, TableEmbedder())
    database = project.database(EOD)
    texts = [" ".join(map(str, database.tokens(row).tolist())) for row in (0, 77)]
    found = searcher.neighbors(texts, 3)
    assert found.shape == (2, 3)
    for row, nearest in zip((0, 77), found[:, 0].tolist(), strict=True):
        assert sorted(database.tokens(nearest)) == sorted(database.tokens(row))
    with pytest.raises(UsageError, match="whose weights differ from those of hash:64"):
        open_searcher(project, HashEmbedder())
