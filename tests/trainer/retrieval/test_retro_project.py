"""A Retro project of megatron-core 0.15.3 is read as it is: the same arrays, samples and neighbours."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.retrieval.array_files import FORMATS, h5py_module, whole
from megatron_lite.retrieval.faiss_index import faiss_module
from megatron_lite.retrieval.retro.project import Project, open_project
from tests.trainer.retrieval.retro_fixture import EOD, INFO, expected, megatrons_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    pytest.importorskip("h5py")
    return open_project(megatrons_project(tmp_path_factory.mktemp("retro") / "project"))


@pytest.mark.parametrize("part", ["sampled", "train", "valid"])
def test_chunks_are_megatrons(project: Project, part: str) -> None:
    assert_array_equal(project.database(EOD, part).chunks, expected()[f"db/{part}"])


@pytest.mark.parametrize("split", ["train", "valid"])
def test_samples_are_megatrons(project: Project, split: str) -> None:
    """Tokens, dataset and documents of each sample; documents are padded with -1 in the fixture."""
    windows, wanted = project.windows(split), expected()
    assert windows is not None
    assert len(windows) == INFO["samples"][split]
    for index in range(len(windows)):
        assert_array_equal(windows.window(index), wanted[f"samples/{split}/text"][index])
        dataset, documents = windows.documents(index)
        row = wanted[f"samples/{split}/document_ids"][index]
        assert dataset == wanted[f"samples/{split}/dataset_id"][index]
        assert_array_equal(documents, row[row >= 0])


@pytest.mark.parametrize("split", ["train", "valid"])
def test_neighbours_and_their_tokens_are_megatrons(project: Project, split: str) -> None:
    """52 rows of the fixture continue past the end of the database, or have no neighbour."""
    near, wanted = project.neighbors(split), expected()
    assert near is not None
    database = project.database(EOD)
    kept = INFO["retro_num_neighbors"]
    for sample in range(len(near)):
        rows = near.of_sample(sample, kept)
        found = database.retrieved(rows, INFO["retro_num_retrieved_chunks"], megatron=True)
        assert_array_equal(found, wanted[f"samples/{split}/neighbor_tokens"][sample])
        assert_array_equal(
            rows % len(database), wanted[f"samples/{split}/neighbor_chunks"][sample][:, :, 0]
        )
    assert_array_equal(near.of_sample(len(near), kept), near.of_sample(0, kept))


def test_a_continuation_ends_with_its_document(project: Project) -> None:
    """The chunk behind a document's last one is EOD alone; in Megatron it is the next document's first."""
    database = project.database(EOD)
    documents = database.documents(np.arange(len(database)))
    last = int(np.flatnonzero(np.any(documents[1:] != documents[:-1], axis=1))[0])
    length = database.chunk_length
    found = database.retrieved(np.array([last, last - 1, -1, len(database) - 1]), 2)
    assert_array_equal(found[0], [*database.tokens(last), *[EOD] * length])
    assert_array_equal(found[1], [*database.tokens(last - 1), *database.tokens(last)])
    assert_array_equal(found[2], [EOD] * 2 * length)
    assert_array_equal(found[3][length:], [EOD] * length)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_no_neighbour_is_of_a_document_of_its_sample(project: Project, split: str) -> None:
    database, near, windows = (
        project.database(EOD),
        project.neighbors(split),
        project.windows(split),
    )
    assert near is not None
    assert windows is not None
    checked = 0
    for sample in range(len(near)):
        dataset, documents = windows.documents(sample)
        rows = near.of_sample(sample, near.saved)
        for other, document in database.documents(rows[rows >= 0]).tolist():
            assert other != dataset or document not in documents
            checked += 1
    assert checked > len(near) * near.saved


@pytest.mark.parametrize(("name", "opens"), [("faiss", faiss_module), ("h5py", h5py_module)])
def test_a_missing_package_is_named_with_its_extra(
    name: str, opens: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"needs the package {name};.*retrieval"):
        opens()


def change(project: Project, tmp_path: Path, **values: Any) -> Path:
    """A project with another config.json and the same files."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("data", "db", "query"):
        (copy / name).symlink_to(project.path / name)
    config = json.loads((project.path / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    return copy


def test_neighbours_of_another_run_are_refused(project: Project, tmp_path: Path) -> None:
    other = open_project(change(project, tmp_path, retro_gpt_train_samples=32))
    with pytest.raises(UsageError, match="the query made 96 chunks, the run needs 128"):
        other.neighbors("train")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retro_gpt_seq_length": 30}, "30 tokens is not a whole number of chunks of 8"),
        ({"retro_gpt_seq_length": "x"}, "a number of at least 1 was expected"),
        ({"retro_gpt_data_path": 7}, "a list was expected"),
        ({"retro_neighbor_dirs": {"train": "../../etc"}}, "a name below query/ was expected"),
        ({"megatron_lite": {"format": "zarr"}}, "there are numpy, megatron"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    project: Project, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises((CorruptCheckpoint, UsageError), match=message):
        open_project(change(project, tmp_path, **values))


def test_more_neighbours_than_saved_are_refused(project: Project) -> None:
    near = project.neighbors("train")
    assert near is not None
    with pytest.raises(UsageError, match="4 neighbours of each chunk are saved, 5 are needed"):
        near.of_sample(0, 5)


@pytest.mark.parametrize("name", FORMATS)
def test_arrays_come_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    files, stem = FORMATS[name], tmp_path / "below" / "000-012"
    arrays = {
        "rows": np.arange(24, dtype=np.uint32).reshape(12, 2),
        "none": np.empty((0, 4), np.uint32),
        "count": np.array([12], np.uint64),
    }
    assert not files.has(stem, *arrays)
    files.write(stem, {key: whole(array) for key, array in arrays.items()})
    assert files.has(stem, *arrays)
    for key, array in arrays.items():
        found = files.read(stem, key)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert_array_equal(found, array)


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_array_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    files, stem = FORMATS[name], tmp_path / "0-9"
    files.write(stem, {"rows": whole(np.arange(20_000))})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptCheckpoint, match=path.name):
        files.read(stem, "rows")
