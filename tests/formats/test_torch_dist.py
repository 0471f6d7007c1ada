"""Distributed checkpoints on the level of bytes: what is written has literal bytes, what is changed is noticed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats import dcp_metadata, torch_dist, zarr_arrays
from formats.dcp_metadata import DcpMetadata, Range, StoredChunk, StoredTensor
from formats.distcp_files import DistcpFiles
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.input_file import InputFile
from formats.output import whole_content
from formats.pickle_records import NumpyArray
from formats.pickle_writer import Constant
from formats.tensor import read_tensor
from tests.conftest import FIXTURES

SMALL = FIXTURES / "dcp-handmade-viewstorage" / "ckpt"
REAL = sorted(str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("d*/*/.metadata"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(SMALL, tmp_path_factory.mktemp("dcp") / "ckpt")


@given(st.integers(0), st.integers(0, 255), st.sampled_from([".metadata", "__0_0.distcp"]))
@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_changed_byte_raises_nothing_but_our_own_errors(
    copied: Path, place: int, byte: int, name: str
) -> None:
    content = bytearray((SMALL / name).read_bytes())
    content[place % len(content)] = byte
    (copied / name).write_bytes(content)
    try:
        opened = torch_dist.open_directory(copied)
        for tensor in opened.tensors().values():
            read_tensor(tensor)
        for key in opened.objects():
            opened.read_object(key)
    except CheckpointError:
        pass
    finally:
        (copied / name).write_bytes((SMALL / name).read_bytes())


@pytest.mark.parametrize("name", REAL)
def test_metadata_that_is_written_says_what_was_read(name: str, tmp_path: Path) -> None:
    read = dcp_metadata.read(FIXTURES / name)
    for nested_keys in (False, True):
        (tmp_path / ".metadata").write_bytes(dcp_metadata.write(read, nested_keys=nested_keys))
        again = dcp_metadata.read(tmp_path / ".metadata")
        assert (again.tensors, again.objects) == (read.tensors, read.objects)


def test_metadata_is_made_of_names_that_torch_knows() -> None:
    """Literally: protocol 2, the classes by name, their attributes as dictionaries."""
    chunk = StoredChunk((0,), (2,), Range("__0_0.distcp", 5, 7))
    written = dcp_metadata.write(
        DcpMetadata({"a": StoredTensor((2,), "bfloat16", (chunk,))}, {}), nested_keys=False
    )
    assert written.startswith(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nq\x00)\x81}("
    )
    for line in (
        b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        b"ctorch\nbfloat16\n",
        b"ctorch\nSize\n",
    ):
        assert written.count(line) == 1


def test_a_small_archive_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten system calls for the headers of each chunk took most of the time of a mixture with many small tensors."""
    reads: list[int] = []
    fill = InputFile._fill

    def counted(file: InputFile, offset: int, view: memoryview) -> None:
        reads.append(offset)
        fill(file, offset, view)

    tensor = next(iter(torch_dist.open_directory(SMALL).tensors().values()))
    monkeypatch.setattr(InputFile, "_fill", counted)
    read_tensor(tensor)
    kind_archive_and_elements = 3
    assert len(reads) <= kind_archive_and_elements * len(tensor.chunks)


def test_archives_lie_side_by_side_in_the_emptiest_file() -> None:
    files = DistcpFiles(2)
    places = [files.add_chunk("a", (3, 1000), "float32", (row, 0), (1, 1000)) for row in range(3)]
    assert [file for file, _ in places] == ["__0_0.distcp", "__1_0.distcp", "__0_0.distcp"]
    layouts = files.layouts(nested_keys=False)
    first, second = (
        layouts["__0_0.distcp"].records[record] for _, record in (places[0], places[2])
    )
    one = layouts["__1_0.distcp"].size
    assert layouts["__0_0.distcp"].size == 2 * one
    assert (second.offset - first.offset, second.nbytes) == (one, 4000)


def test_objects_that_differ_only_in_an_array_or_a_tensor_are_different(tmp_path: Path) -> None:
    files = DistcpFiles(1)
    arrays = [NumpyArray("<u4", (1,), bytes([number, 0, 0, 0])) for number in range(2)]
    tensors = [Constant((1,), "uint8", bytes([number])) for number in range(2)]
    for number in range(2):
        files.add_object(f"array/shard_{number}_2", [arrays[number]])
        files.add_object(f"tensor/shard_{number}_2", [tensors[number]])
    for name, layout in files.layouts(nested_keys=False).items():
        (tmp_path / name).write_bytes(whole_content(layout))
    opened = torch_dist.open_directory(tmp_path)
    for number in range(2):
        assert opened.read_object(f"array/shard_{number}_2") == arrays[number]
        tensor: Any = opened.read_object(f"tensor/shard_{number}_2")
        assert read_tensor(tensor).tobytes() == tensors[number].data


def test_a_checkpoint_without_tensors_has_no_empty_files() -> None:
    files = DistcpFiles(4)
    files.add_object("nothing", [None])
    assert sorted(files.layouts(nested_keys=False)) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b'{"shape": [2], "chunks": [1, 1], "dtype": "<f4"}']
)
def test_a_zarr_array_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".zarray").write_bytes(content)
    if not content:  # a lock that the writer forgot
        assert not zarr_arrays.open_directory(tmp_path).tensors()
        return
    with pytest.raises(CorruptCheckpoint, match=r"a/\.zarray"):
        zarr_arrays.open_directory(tmp_path)


def test_a_zarr_array_of_a_single_number_and_one_with_uneven_edges_are_read(tmp_path: Path) -> None:
    for name, shape, step, chunks in (
        ("scalar", (), (), {"0": b"\7"}),
        (
            "edges",
            (3, 3),
            (2, 2),
            {"0.0": b"\0\1\3\4", "0.1": b"\2x\5x", "1.0": b"\6\7xx", "1.1": b"\10xxx"},
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_bytes(zarr_arrays.array_json(shape, step, "uint8"))
        for place, content in chunks.items():
            (tmp_path / name / place).write_bytes(content)
    tensors = zarr_arrays.open_directory(tmp_path).tensors()
    assert read_tensor(tensors["scalar"]).tolist() == [[7]]
    assert read_tensor(tensors["edges"]).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
