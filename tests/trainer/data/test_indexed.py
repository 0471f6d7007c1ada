"""Indexed files: byte for byte Megatron's, readable both ways, and refused with one sentence when something is wrong."""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import CorruptCheckpoint, TargetExists
from megaconv.errors import UsageError
from megatron_lite.data.indexed import DTYPES, IndexedDataset, token_dtype
from megatron_lite.data.indexed_writer import IndexedWriter
from tests.trainer.data.corpus import write_documents

U16 = DTYPES[8]

DOCUMENTS = [[[1, 2, 3]], [[]], [[4], [5, 6]], [], [[7] * 100]]
"""Documents with an empty sequence, with several sequences, and with none."""


def read(prefix: Path) -> list[list[list[int]]]:
    data = IndexedDataset(prefix)
    bounds = data.documents.tolist()
    return [
        [data.get(number).tolist() for number in range(first, last)]
        for first, last in pairwise(bounds)
    ]


def test_a_dataset_has_exactly_these_bytes(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", [[[1, 2, 3]], [], [[258]]])
    assert (tmp_path / "x.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 2, 1])
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2, 4)
        + struct.pack("<2i2q4q", 3, 1, 0, 6, 0, 1, 1, 2)
    )


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("modes", [False, True], ids=["plain", "modes"])
@pytest.mark.parametrize("code", sorted(DTYPES))
def test_megatron_writes_the_same_bytes_and_both_read_the_others(
    tmp_path: Path, code: int, modes: bool
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=DTYPES[code].type, multimodal=modes
    )
    for sequences in DOCUMENTS:
        flat = [token for sequence in sequences for token in sequence]
        kinds = list(range(len(sequences))) if modes else None
        builder.add_document(flat, [len(sequence) for sequence in sequences], kinds)
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_documents(tmp_path / "ours", DOCUMENTS, code, modes)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (
            tmp_path / f"theirs.{suffix}"
        ).read_bytes()
    assert read(tmp_path / "theirs") == DOCUMENTS
    theirs = Theirs(str(tmp_path / "ours"), multimodal=modes)
    sequences = [theirs[number][0] if modes else theirs[number] for number in range(len(theirs))]
    assert [sequence.tolist() for sequence in sequences] == [
        one for document in DOCUMENTS for one in document
    ]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_merged_datasets_are_those_of_megatron(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    one = write_documents(tmp_path / "one", DOCUMENTS)
    two = write_documents(tmp_path / "two", [[[9, 9]], [], [[8], [7]]])
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for prefix in (one, two, one):
        builder.add_index(str(prefix))
    builder.finalize(str(tmp_path / "theirs.idx"))
    with IndexedWriter(tmp_path / "ours", U16) as writer:
        for prefix in (one, two, one):
            writer.add_dataset(prefix)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (
            tmp_path / f"theirs.{suffix}"
        ).read_bytes()


@given(
    st.lists(st.lists(st.lists(st.integers(-128, 127), max_size=5), max_size=4), max_size=8),
    st.booleans(),
    st.sampled_from([2, 3, 4, 5]),
)
@settings(max_examples=40, deadline=None)
def test_written_documents_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Any], modes: bool, code: int
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "x"
    write_documents(prefix, documents, code, modes)
    assert read(prefix) == documents
    found = IndexedDataset(prefix)
    assert found.dtype == DTYPES[code]
    expected = [number for document in documents for number in range(len(document))]
    assert (
        (found.modes is not None and found.modes.tolist() == expected)
        if modes and expected
        else found.modes is None
    )


def test_part_of_a_sequence(tmp_path: Path) -> None:
    data = IndexedDataset(write_documents(tmp_path / "x", [[[1, 2, 3, 4]]]))
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data.get(0, 2).tolist() == [3, 4]
    assert data.get(0, 4).tolist() == []
    for offset, length in ((0, 5), (3, 2), (-1, 1), (5, None), (0, -1)):
        with pytest.raises(IndexError, match="4 tokens"):
            data.get(0, offset, length)


@pytest.mark.parametrize(
    ("vocab", "name"), [(65499, "uint16"), (65500, "int32"), (128256, "int32"), (1, "uint16")]
)
def test_two_bytes_a_token_for_vocabularies_below_65500(vocab: int, name: str) -> None:
    assert token_dtype(vocab).name == name


# What is wrong with a file.


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "x", [[[1, 2, 3]], [[4, 5]]])


def change(path: Path, offset: int, layout: str, *values: Any) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, offset, *values)
    path.write_bytes(bytes(data))


LENGTHS, POINTERS, DOCS = 34, 42, 58


@pytest.mark.parametrize(
    ("offset", "layout", "values", "words"),
    [
        (0, "4s", [b"TNTI"], "MMIDIDX"),
        (9, "<Q", [2], "version 2"),
        (17, "B", [7], "dtype code 7"),
        (17, "B", [0], "dtype code 0"),
        (18, "<Q", [3], "truncated"),
        (18, "<Q", [2**63], "truncated"),
        (26, "<Q", [2], "truncated"),
        (DOCS, "<q", [1], "document array"),
        (DOCS + 16, "<q", [3], "document array"),
        (DOCS + 8, "<q", [5], "backwards"),
        (DOCS + 8, "<q", [-1], "backwards"),
        (LENGTHS, "<i", [-1], "sequence 0"),
        (LENGTHS, "<i", [2**31 - 1], "sequence 0"),
        (LENGTHS + 4, "<i", [3], "sequence 1"),
        (LENGTHS + 4, "<i", [1], "two datasets"),
        (POINTERS + 8, "<q", [-2], "sequence 1"),
        (POINTERS + 8, "<q", [2**63 - 1], "sequence 1"),
        (17, "B", [4], "sequence"),
    ],
    ids=lambda value: str(value).replace("/", " "),
)
def test_an_index_that_cannot_be_true_is_refused(
    prefix: Path, offset: int, layout: str, values: list[Any], words: str
) -> None:
    change(Path(f"{prefix}.idx"), offset, layout, *values)
    with pytest.raises(CorruptCheckpoint, match=words) as error:
        IndexedDataset(prefix)
    assert str(prefix) in str(error.value)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_cut_anywhere_or_with_a_tail_is_refused(prefix: Path, suffix: str) -> None:
    path = Path(f"{prefix}.{suffix}")
    whole = path.read_bytes()
    # Two more bytes would be the modes of two sequences.
    for data in (*(whole[:size] for size in range(len(whole))), whole + b"\0", whole + b"\0\0\0"):
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=str(prefix)):
            IndexedDataset(prefix)


def test_a_missing_file_is_named(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"x\.bin: no such file"):
        IndexedDataset(prefix)


# Writing.


def fail_midway(writer: IndexedWriter) -> None:
    with writer:
        writer.add([9], [1])
        raise RuntimeError


def test_the_dataset_that_preprocess_made_of_a_prefix_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus_text_document.idx").touch()
    with pytest.raises(
        CorruptCheckpoint,
        match=r"corpus\.idx: no such file; .*; is .*/corpus_text_document meant\?",
    ):
        IndexedDataset(tmp_path / "corpus")


def test_nothing_is_left_of_a_writing_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fail_midway(IndexedWriter(tmp_path / "x", U16))
    assert not list(tmp_path.iterdir())


def test_existing_data_stays_unless_overwrite_is_given(prefix: Path) -> None:
    before = read(prefix)
    with pytest.raises(TargetExists, match="--overwrite"):
        IndexedWriter(prefix, U16)
    with pytest.raises(RuntimeError):
        fail_midway(IndexedWriter(prefix, U16, overwrite=True))
    assert read(prefix) == before
    with IndexedWriter(prefix, U16, overwrite=True) as writer:
        writer.add([9], [1])
    assert read(prefix) == [[[9]]]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["x.bin", "x.idx"]


def test_two_runs_do_not_write_one_dataset(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", U16) as first:
        first.add([1], [1])
        with pytest.raises(TargetExists, match="another run"):
            IndexedWriter(tmp_path / "x", U16)
    assert read(tmp_path / "x") == [[[1]]]


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused_and_not_wrapped(tmp_path: Path, token: int) -> None:
    with pytest.raises(UsageError, match=str(token)), IndexedWriter(tmp_path / "x", U16) as writer:
        writer.add([1, token], [2])
    assert not list(tmp_path.iterdir())


def test_datasets_of_two_vocabularies_are_not_merged(tmp_path: Path, prefix: Path) -> None:
    with (
        pytest.raises(UsageError, match="int32"),
        IndexedWriter(tmp_path / "y", DTYPES[4]) as writer,
    ):
        writer.add_dataset(prefix)
