"""safetensors byte by byte: golden literals, the safetensors library on the other side, one broken file per error."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from formats import safetensors
from formats.ceilings import HEADER_BYTES
from formats.errors import CheckpointError, CorruptCheckpoint, UnsafeContent
from formats.safetensors import DTYPES, SafetensorsLayout, index_json, read_index, shard
from formats.tensor import read_tensor

GOLDEN_HEADER = (
    b"\xc8\0\0\0\0\0\0\0"
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    b'"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[3,7]},'
    b'"scalar":{"dtype":"F32","shape":[],"data_offsets":[7,11]}}  '
)
GOLDEN = GOLDEN_HEADER + b"\x01\x02\x03" + b"\x80\x3f\x00\xc0" + b"\0\0\x80\x3f"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def assert_broken(path: Path, *words: str) -> None:
    with pytest.raises(CorruptCheckpoint) as error:
        safetensors.read(path)
    assert str(error.value).startswith(str(path))
    for word in words:
        assert word in str(error.value)


# What a file looks like.


def test_a_file_is_read_from_its_literal_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOLDEN)
    tensors = safetensors.read(tmp_path / "x")
    assert {
        name: (tensor.shape, tensor.dtype, read_tensor(tensor).tobytes())
        for name, tensor in tensors.items()
    } == {
        "b": ((3,), "uint8", b"\1\2\3"),
        "a": ((1, 2), "bfloat16", b"\x80\x3f\x00\xc0"),
        "scalar": ((), "float32", b"\0\0\x80\x3f"),
    }


def test_a_file_is_laid_out_in_these_literal_bytes() -> None:
    layout = SafetensorsLayout(
        {"b": ((3,), "uint8"), "a": ((1, 2), "bfloat16"), "scalar": ((), "float32")}
    )
    assert list(layout.headers({})) == [(0, GOLDEN_HEADER)]
    assert layout.size == len(GOLDEN)
    assert layout.records == {"b": (208, 3), "a": (211, 4), "scalar": (215, 4)}
    assert not layout.needs_checksums


def test_the_library_reads_the_literal_bytes_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOLDEN)
    tensors = load_file(tmp_path / "x")
    assert tensors["b"].tolist() == [1, 2, 3]
    assert tensors["a"].tolist() == [[1, -2]]
    assert tensors["scalar"].item() == 1


@pytest.mark.parametrize("names", [[], ["a"], ["a" * 7], ["ä", "日本"], ['"quoted"\n']])
def test_tensors_start_at_a_multiple_of_eight(names: list[str]) -> None:
    layout = SafetensorsLayout(dict.fromkeys(names, ((5,), "int8")))
    ((offset, header),) = layout.headers({})
    assert offset == 0
    assert len(header) % 8 == 0
    assert len(header) == 8 + int.from_bytes(header[:8], "little")
    assert [record.offset for record in layout.records.values()] == [
        len(header) + 5 * index for index in range(len(names))
    ]


# The safetensors library on the other side.

TORCH_DTYPES = sorted(name for name in DTYPES.values() if hasattr(torch, name))


def random_tensor(shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    values = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, prod(shape) * kind.itemsize, np.uint8
    )
    return (
        torch.from_numpy(values).view(kind).reshape(shape)
        if values.size
        else torch.empty(shape, dtype=kind)
    )


tensors = st.builds(
    random_tensor,
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(TORCH_DTYPES),
    st.integers(0, 2**32 - 1),
)
models = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors, max_size=5
)


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


@settings(max_examples=60, deadline=None)
@given(models, st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1))
def test_files_of_the_safetensors_library_are_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("library") / "x.safetensors"
    save_file(model, path, metadata)
    found = safetensors.read(path)
    assert set(found) == set(model)
    for name, tensor in model.items():
        assert (found[name].shape, found[name].dtype) == (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )
        assert read_tensor(found[name]).tobytes() == raw(tensor)


@settings(max_examples=60, deadline=None)
@given(models)
def test_the_safetensors_library_reads_our_files_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, model: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("ours") / "x.safetensors"
    layout = SafetensorsLayout(
        {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in model.items()
        }
    )
    content = bytearray(layout.size)
    for name, (offset, nbytes) in layout.records.items():
        content[offset : offset + nbytes] = raw(model[name])
    for offset, data in layout.headers({}):
        content[offset : offset + len(data)] = data
    assert len(content) == layout.size
    path.write_bytes(content)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = load_file(path)
    assert set(found) == set(model)
    for name, tensor in model.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert raw(found[name]) == raw(tensor)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_never_raise_anything_else_and_never_mislead(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """If we and the library both accept a changed file, we find the same tensors in it."""
    content = bytearray(GOLDEN)
    for position in data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "x.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        found = safetensors.read(path)
    except CheckpointError:
        return
    try:
        theirs = load_file(path)
    except (SafetensorError, AttributeError):
        return
    assert {name: raw(tensor) for name, tensor in theirs.items()} == {
        name: read_tensor(tensor).tobytes() for name, tensor in found.items()
    }


# One broken file per error.


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6], **changes}}


def test_the_broken_files_are_broken_by_their_changes_alone(tmp_path: Path) -> None:
    assert safetensors.read(write(tmp_path / "x", entry(), bytes(6)))["a"].shape == (2, 3)
    assert safetensors.read(write(tmp_path / "x", {})) == {}


@pytest.mark.parametrize("content", [b"", b"\1\0\0"])
def test_a_file_shorter_than_its_first_number_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert_broken(tmp_path / "x", f"the file has {len(content)}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert_broken(tmp_path / "x", "no such file")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert_broken(tmp_path / "x", "is a directory")


@pytest.mark.parametrize("length", [3, 1 << 40, 100_000_001, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    assert_broken(
        write(tmp_path / "x", {}, length=length), f"a header of {length} bytes", "the file has 10"
    )


def test_a_header_longer_than_any_checkpoint_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"{}", length=HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 9)
    assert_broken(path, "a header of 33,554,433 bytes")


def test_a_shape_with_more_axes_than_any_tensor_has_is_refused(tmp_path: Path) -> None:
    assert_broken(write(tmp_path / "x", entry(shape=[1] * 64 + [6]), bytes(6)), "at most 64")
    assert safetensors.read(write(tmp_path / "x", entry(shape=[1] * 63 + [6]), bytes(6)))


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"
    )
    assert_broken(tmp_path / "x", "git lfs pull")


@pytest.mark.parametrize(
    "header", [b"", b"{", b'{"a":}', b"\xff\xfe", b"[" * 100_000, b"{}{}", b"{}\0"]
)
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: bytes) -> None:
    assert_broken(write(tmp_path / "x", header), "not a valid safetensors file")


@pytest.mark.parametrize(
    "header", [[], "a", 7, None, [["a", {}]], {"a": 7}, {"a": []}, {"a": None}]
)
def test_a_header_that_is_no_object_of_objects_is_refused(tmp_path: Path, header: Any) -> None:
    assert_broken(write(tmp_path / "x", header), "not a valid safetensors file")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_tensor_without_a_field_is_refused_and_the_field_named(tmp_path: Path, key: str) -> None:
    header = entry()
    header["a"].pop(key)
    assert_broken(write(tmp_path / "x", header, bytes(6)), key)


@pytest.mark.parametrize("dtype", ["u8", "F128", "", None, 8, ["U8"]])
def test_an_unknown_dtype_is_named(tmp_path: Path, dtype: Any) -> None:
    assert_broken(
        write(tmp_path / "x", entry(dtype=dtype), bytes(6)),
        *([f"a: dtype {dtype!r} is not known"] * (dtype != ["U8"])),
    )


@pytest.mark.parametrize(
    "shape", [[-2, -3], [2, 3.0], ["2", "3"], [True, 6], [2, None], "23", 6, None, {"2": 3}]
)
def test_a_shape_of_anything_but_numbers_is_refused(tmp_path: Path, shape: Any) -> None:
    assert_broken(write(tmp_path / "x", entry(shape=shape), bytes(6)))


@pytest.mark.parametrize(
    "offsets", [[-6, 0], [0.0, 6.0], [0, 6, 9], [6], [], None, "06", [False, 6], [0, None]]
)
def test_offsets_that_are_not_two_numbers_are_refused(tmp_path: Path, offsets: Any) -> None:
    assert_broken(write(tmp_path / "x", entry(data_offsets=offsets), bytes(6)))


@pytest.mark.parametrize(
    "changes",
    [{"shape": [2, 4]}, {"dtype": "F32"}, {"shape": [1 << 60, 1 << 60]}, {"data_offsets": [6, 0]}],
)
def test_a_tensor_that_does_not_fill_its_bytes_is_named(tmp_path: Path, changes: Any) -> None:
    assert_broken(write(tmp_path / "x", entry(**changes), bytes(6)), "a: ", "doesn't fill")


def test_a_tensor_beyond_the_end_is_refused(tmp_path: Path) -> None:
    assert_broken(
        write(tmp_path / "x", entry(data_offsets=[1 << 60, (1 << 60) + 6]), bytes(6)),
        "reaches past the end",
    )


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    assert_broken(write(tmp_path / "x", entry(), bytes(5)), "past the end")


@pytest.mark.parametrize(("begin", "size"), [(0, 7), (1, 7), (0, 1000)])
def test_a_hole_in_the_file_is_refused(tmp_path: Path, begin: int, size: int) -> None:
    assert_broken(
        write(tmp_path / "x", entry(data_offsets=[begin, begin + 6]), bytes(size)), "hole"
    )


@pytest.mark.parametrize("begin", [0, 3])
def test_overlapping_tensors_are_refused(tmp_path: Path, begin: int) -> None:
    header = entry() | {"b": {"dtype": "U8", "shape": [6], "data_offsets": [begin, begin + 6]}}
    assert_broken(write(tmp_path / "x", header, bytes(begin + 6)), "overlap")


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'
    assert_broken(write(tmp_path / "x", text), "duplicate key")


# Indexes.


def test_an_index_is_written_and_read_back(tmp_path: Path) -> None:
    files = {"b": "two.safetensors", "a": "one.safetensors"}
    (tmp_path / "index.json").write_bytes(index_json(files, 12))
    assert read_index(tmp_path / "index.json") == files
    assert json.loads((tmp_path / "index.json").read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": files,
    }


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"weight_map": 7}', '{"weight_map": ["a"]}', "{}", "[" * 100_000],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(
        CorruptCheckpoint, match=r"index\.json: is not a (valid index|readable JSON file)"
    ):
        read_index(tmp_path / "index.json")


def test_a_missing_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"index\.json: no such file"):
        read_index(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "a/", "", ".", "..", "./x"])
def test_an_index_that_leaves_its_directory_is_unsafe(tmp_path: Path, name: str) -> None:
    (tmp_path / "index.json").write_bytes(index_json({"a": name}, 0))
    with pytest.raises(UnsafeContent, match="not in the same directory"):
        read_index(tmp_path / "index.json")


# Shards.


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(1, 120))
def test_shards_keep_the_order_and_stay_below_the_limit(sizes: list[int], limit: int) -> None:
    tensors = [(f"t{index}", (size,), "uint8") for index, size in enumerate(sizes)]
    shards = shard(tensors, limit)
    assert [tensor for members in shards for tensor in members] == tensors
    for members in shards:
        total = sum(shape[0] for _, shape, _ in members)
        assert total <= limit or len([shape for _, shape, _ in members if shape[0]]) == 1


@pytest.mark.parametrize("size", [0, 6])
def test_a_file_that_ends_in_its_first_number_asks_for_a_complete_copy(
    tmp_path: Path, size: int
) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    assert_broken(tmp_path / "x", f"but the file has {size}; is the copy complete?")
