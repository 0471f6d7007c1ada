"""Files of torch.save, old and new: read without torch, written so that torch reads them."""

import os
import pickle
import shutil
import struct
import subprocess
import types
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isal.isal_zlib import crc32, crc32_combine
from torch._subclasses.fake_tensor import FakeTensorMode

from formats.errors import CheckpointError, CorruptCheckpoint, UnsafeContent
from formats.output import FileLayout
from formats.pickle_guard import Global, NumpyArray, Opaque, TorchDtype
from formats.pickle_writer import dumps
from formats.stored_zip import read_directory
from formats.tensor import ITEMSIZE, FileTensor, InputFile, StridedTensor, byte_count, read_tensor
from formats.torch_zip import NumberedLayout, Placeholder, Varying, plan, read

FIXTURES = Path(__file__).parents[1] / "fixtures"
DTYPES = sorted(ITEMSIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch")


# ---- comparing with torch ----


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(expected: Any, found: Any) -> None:
    """found: what `read` made of the file that torch loads as expected."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, (FileTensor, StridedTensor))
        assert (found.shape, f"torch.{found.dtype}") == (tuple(expected.shape), str(expected.dtype))
        assert read_tensor(found).tobytes() == tensor_bytes(expected)
    elif isinstance(expected, Namespace):
        assert_same(vars(expected), vars(found))
    elif isinstance(expected, dict):
        assert len(expected) == len(found)
        for (key, value), (found_key, found_value) in zip(
            expected.items(), found.items(), strict=True
        ):
            assert_same(key, found_key)
            assert_same(value, found_value)
    elif isinstance(expected, (list, tuple)):
        assert (type(found), len(found)) == (type(expected), len(expected))
        for value, found_value in zip(expected, found, strict=True):
            assert_same(value, found_value)
    elif isinstance(expected, torch.dtype):
        assert found == TorchDtype(str(expected).removeprefix("torch."))
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, NumpyArray)
        assert np.array_equal(np.frombuffer(found.data, found.dtype).reshape(found.shape), expected)
    elif isinstance(found, Opaque):
        assert found.name == type(expected).__name__
    else:
        assert (type(found), found) == (type(expected), expected)


class Stub:
    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class StubbingUnpickler(pickle.Unpickler):
    """Loads Megatron's classes as empty ones."""

    def find_class(self, module: str, name: str) -> Any:
        return (
            type(name, (Stub,), {})
            if module.startswith("megatron.")
            else super().find_class(module, name)
        )


STUBBING = types.SimpleNamespace(Unpickler=StubbingUnpickler, load=pickle.load, __name__="stubbing")


RANK_FILES = sorted(
    str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("*/checkpoint/*/mp_rank*/*.pt")
)


@pytest.mark.parametrize("name", RANK_FILES)
def test_files_of_megatron_are_read_as_torch_reads_them(name: str) -> None:
    path = FIXTURES / name
    expected = torch.load(path, map_location="cpu", weights_only=False, pickle_module=STUBBING)
    assert_same(expected, read(path))


# ---- reading what torch saves ----

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    high = 2 if dtype == "bool" else 256
    return tensor_of(
        np.random.default_rng(seed).integers(0, high, byte_count(shape, dtype), np.uint8),
        shape,
        dtype,
    )


def tensor_of(content: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return (
        torch.from_numpy(content).view(kind).reshape(shape)
        if prod(shape)
        else torch.empty(shape, dtype=kind)
    )


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.mT if t.ndim > 1 else t,
    "every other row": lambda t: t[::2] if t.ndim else t,
    "every other column": lambda t: t[..., 1::2] if t.ndim else t,
    "last row": lambda t: t[-1] if t.ndim and t.shape[0] else t,
    "permuted": lambda t: t.permute(*range(1, t.ndim), 0) if t.ndim else t,
    "squeezed in": lambda t: t[None],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}
tensors = st.builds(
    lambda shape, dtype, seed, view: VIEWS[view](random_tensor(shape, dtype, seed)),
    shapes, st.sampled_from(DTYPES), st.integers(0, 99), st.sampled_from(sorted(VIEWS)),
)  # fmt: skip
keys = st.text(max_size=9) | st.integers(-(2**40), 2**40)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
)


def objects(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        # Names such as __dict__ are not plain attributes.
        names = st.text(min_size=1, max_size=9).filter(lambda name: not name.startswith("__"))
        namespaces = st.dictionaries(names, inner, max_size=4).map(lambda d: Namespace(**d))
        mappings = st.dictionaries(keys, inner, max_size=4)
        lists = st.lists(inner, max_size=5)
        return lists | lists.map(tuple) | mappings | mappings.map(OrderedDict) | namespaces

    return st.recursive(leaves, nest, max_leaves=12)


@settings(max_examples=120, deadline=None)
@given(
    value=objects(scalars | tensors | st.sampled_from([torch.float32, torch.bfloat16])),
    zipped=st.booleans(),
)
def test_any_object_saved_by_torch_is_read_back(folder: Path, value: Any, zipped: bool) -> None:
    path = folder / "saved.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    assert_same(value, read(path))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_that_share_a_storage_are_read_from_it(folder: Path, zipped: bool) -> None:
    base = torch.arange(1000, dtype=torch.float32)
    parts = {
        "part": base[64:128],
        "matrix": base[200:260].view(6, 10),
        "turned": base[:12].view(3, 4).t(),
    }
    value = {"base": base, **parts, "again": base}
    path = folder / "shared.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    assert path.stat().st_size < 8000
    assert_same(value, read(path))


@pytest.mark.parametrize("zipped", [True, False])
def test_an_expanded_tensor_is_refused(folder: Path, zipped: bool) -> None:
    path = folder / "expanded.pt"
    overlapping = torch.zeros(7).as_strided((4, 4), (1, 1))
    for value in (torch.zeros(1).expand(2, 3), torch.zeros(100)[:1].expand(3), overlapping):
        torch.save({"x": value}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CorruptCheckpoint, match=r"expanded|\.contiguous"):
            read(path)


def test_overlapping_views_of_large_storages_are_read(folder: Path) -> None:
    value = {"windows": torch.arange(100.0).unfold(0, 4, 2)[:10]}
    torch.save(value, folder / "windows.pt")
    assert_same(value, read(folder / "windows.pt"))


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_sparse_tensors_become_records(folder: Path) -> None:
    quantized, sparse = (
        torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        torch.eye(3).to_sparse(),
    )
    torch.save({"q": quantized, "s": sparse, "x": torch.ones(2)}, folder / "odd.pt")
    loaded = read(folder / "odd.pt")
    assert isinstance(loaded, dict)
    assert (loaded["q"].name, loaded["s"].name) == ("_rebuild_qtensor", "_rebuild_sparse_tensor")
    assert_same(torch.ones(2), loaded["x"])


def test_tensors_with_attributes_are_read_without_them(folder: Path) -> None:
    tensor = torch.ones(3)
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    torch.save([tensor], folder / "attributes.pt")
    assert_same([torch.ones(3)], read(folder / "attributes.pt"))


def test_files_without_checksums_are_read(folder: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([torch.ones(3)], folder / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same([torch.ones(3)], read(folder / "unchecked.pt"))


def test_a_file_packed_again_by_unzip_and_zip_is_read(folder: Path) -> None:
    torch.save({"x": torch.arange(9)}, folder / "before.pt")
    with (
        zipfile.ZipFile(folder / "before.pt") as before,
        zipfile.ZipFile(folder / "after.pt", "w") as after,
    ):
        after.writestr("renamed/", b"")
        for name in before.namelist():
            after.writestr("renamed/" + name.partition("/")[2], before.read(name))
    assert_same({"x": torch.arange(9)}, read(folder / "after.pt"))


def test_a_file_with_an_unusual_name_is_read(folder: Path) -> None:
    for name in ("step:100 (final).pt", "ä.b.c"):
        torch.save([torch.ones(3)], folder / name)
        assert_same([torch.ones(3)], read(folder / name))


def test_a_whole_module_is_refused_or_inert(folder: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), folder / "module.pt")
    loaded = read(folder / "module.pt")
    assert isinstance(loaded, Opaque)
    assert (loaded.module, loaded.name) == ("torch.nn.modules.linear", "Linear")


# ---- writing ----

# All bytes are 0 or 1, so that they are also valid booleans.
CONTENT = np.random.default_rng(7).integers(0, 2, 1 << 12, np.uint8).tobytes()


def write(layout: FileLayout, path: Path) -> None:
    contents = {key: CONTENT[: record.nbytes] for key, record in layout.records.items()}
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, content in layout.headers(
            {key: crc32(content) for key, content in contents.items()}
        ):
            file.seek(offset)
            file.write(content)
        for key, content in contents.items():
            file.seek(layout.records[key].offset)
            file.write(content)
    assert path.stat().st_size == layout.size


def torch_value(value: Any) -> Any:
    """The value that torch.load should return for a planned value."""
    if isinstance(value, Placeholder):
        content = np.frombuffer(
            bytearray(CONTENT[: byte_count(value.shape, value.dtype)]), np.uint8
        )
        return tensor_of(content, value.shape, value.dtype)
    if isinstance(value, TorchDtype):
        return getattr(torch, value.name)
    if isinstance(value, Namespace):
        return Namespace(**torch_value(vars(value)))
    if isinstance(value, dict):
        return type(value)((key, torch_value(part)) for key, part in value.items())
    return type(value)(map(torch_value, value)) if isinstance(value, (list, tuple)) else value


def assert_loaded(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert (type(found), found.shape, found.dtype) == (
            torch.Tensor,
            expected.shape,
            expected.dtype,
        )
        assert found.stride() == expected.stride()
        assert not found.requires_grad
        assert tensor_bytes(found) == tensor_bytes(expected)
        return
    assert type(found) is type(expected)
    if isinstance(expected, Namespace):
        assert_loaded(vars(expected), vars(found))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_loaded(list(expected.values()), list(found.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert_loaded(one, other)
    else:
        assert found == expected


def keyed(value: Any, count: list[int]) -> Any:
    """Replace (shape, dtype) marks by placeholders with unique keys."""
    if isinstance(value, Placeholder):
        count[0] += 1
        return Placeholder(f"tensor {count[0]}", value.shape, value.dtype)
    if isinstance(value, Namespace):
        return Namespace(**keyed(vars(value), count))
    if isinstance(value, dict):
        return type(value)((key, keyed(part, count)) for key, part in value.items())
    return (
        type(value)(keyed(part, count) for part in value)
        if isinstance(value, (list, tuple))
        else value
    )


placeholders = st.builds(Placeholder, st.just(""), shapes, st.sampled_from(DTYPES))
planned = objects(scalars | placeholders | st.sampled_from(DTYPES).map(TorchDtype)).map(
    lambda value: keyed(value, [0])
)


@settings(max_examples=120, deadline=None)
@given(
    value=planned, root=st.sampled_from(["model_optim_rng", "x", "ü" * 30]), mapped=st.booleans()
)
def test_torch_loads_planned_files_with_weights_only(
    folder: Path, value: Any, root: str, mapped: bool
) -> None:
    path = folder / "planned.pt"
    write(plan(value, root), path)
    with torch.serialization.safe_globals([Namespace]):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
    assert_loaded(torch_value(value), loaded)
    assert_same(torch_value(value), read(path))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    del loaded


EXAMPLE = {
    "args": Namespace(hidden_size=32, params_dtype=TorchDtype("bfloat16")),
    "model": OrderedDict(
        (f"{dtype} {shape}", Placeholder(f"{dtype} {shape}", shape, dtype))
        for dtype in DTYPES
        for shape in [(), (3, 5), (0, 2), (64,)]
    ),
    "iteration": 100,
}  # fmt: skip


@pytest.mark.parametrize("number", [0, 255, 65_536, 2**31 - 1])
def test_files_that_differ_in_one_number_share_a_layout(folder: Path, number: int) -> None:
    shared = plan(
        {**EXAMPLE, "args": Namespace(before=number, rank=Varying(), after="rank")},
        "model_optim_rng",
    )
    path = folder / "numbered.pt"
    write(NumberedLayout(shared, number), path)
    with torch.serialization.safe_globals([Namespace]):
        assert torch.load(path, weights_only=True)["args"] == Namespace(
            before=number, rank=number, after="rank"
        )
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_file_has_one_number_that_varies_at_most() -> None:
    with pytest.raises(ValueError, match="one number that varies"):
        plan([Varying(), Varying()], "x")
    with pytest.raises(ValueError, match="no number that varies"):
        plan([1], "x").numbered(1)


def test_frame_and_records_cover_the_file_exactly() -> None:
    layout = plan(EXAMPLE, "model_optim_rng")
    ranges = [
        (offset, offset + len(content))
        for offset, content in layout.headers(dict.fromkeys(layout.records, 0))
    ]
    ranges += [
        (record.offset, record.offset + record.nbytes)
        for record in layout.records.values()
        if record.nbytes
    ]
    ends = [0, *(end for _, end in sorted(ranges))]
    assert [start for start, _ in sorted(ranges)] == ends[:-1]
    assert ends[-1] == layout.size
    assert layout.needs_checksums


def test_every_payload_is_aligned_and_in_the_order_of_torch(folder: Path) -> None:
    write(plan(EXAMPLE, "x"), folder / "ours.pt")
    with torch.serialization.safe_globals([Namespace]):
        torch.save(torch.load(folder / "ours.pt"), folder / "x.pt")
    names = []
    for name in ("ours.pt", "x.pt"):
        with zipfile.ZipFile(folder / name) as archive, (folder / name).open("rb") as file:
            names.append([info.filename for info in archive.infolist()])
            for info in archive.infolist():
                file.seek(info.header_offset + 26)
                assert (info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))) % 64 == 0
    assert names[0] == names[1]


def test_the_bytes_of_a_small_file() -> None:
    layout = plan({"w": Placeholder("w", (2,), "float32")}, "x")
    headers = dict(layout.headers({"w": 0x01020304}))
    pickled = (
        b"\x80\x02}(X\x01\x00\x00\x00wq\x00ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storageq\x02"
        b"ctorch\nFloatStorage\nq\x03X\x01\x00\x00\x000q\x04X\x03\x00\x00\x00cpuq\x05K\x02tQK\x00K\x02\x85K\x01\x85\x89"
        b"ccollections\nOrderedDict\nq\x06)RtRu."
    )
    size = len(pickled)
    header = b"PK\3\4\x14\0\0\x08\0\0\0\0\x21\0" + struct.pack(
        "<3I2H", crc32(pickled), size, size, 10, 24
    )
    assert headers[0] == header + b"x/data.pkl" + b"FB\x14\0" + b"Z" * 20 + pickled
    record = layout.records["w"]
    header = b"PK\3\4\x14\0\0\x08\0\0\0\0\x21\0\4\3\2\1\x08\0\0\0\x08\0\0\0\x08\0"
    assert header in b"".join(headers.values())
    assert (record.offset % 64, record.nbytes) == (0, 8)
    assert layout.contents["x/.data/serialization_id"].isdigit()
    assert len(layout.contents["x/.data/serialization_id"]) == 40
    small = {
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        "version": b"3\n",
    }
    assert {name: layout.contents[f"x/{name}"] for name in small} == small
    start = max(headers)
    assert headers[start].endswith(
        b"PK\5\6\0\0\0\0\7\0\7\0" + struct.pack("<2IH", len(headers[start]) - 22, start, 0)
    )


def test_the_same_object_gives_the_same_file() -> None:
    first, second = (
        list(plan(EXAMPLE, "x").headers(dict.fromkeys(plan(EXAMPLE, "x").records, 1)))
        for _ in range(2)
    )
    assert first == second


@pytest.mark.skipif(not shutil.which("unzip"), reason="unzip is not installed")
def test_unzip_finds_no_fault(folder: Path) -> None:
    write(plan(EXAMPLE, "x"), folder / "unzipped.pt")
    assert (
        subprocess.run(
            ["unzip", "-tq", folder / "unzipped.pt"], check=False, capture_output=True
        ).returncode
        == 0
    )


def zeros_crc(count: int) -> int:
    """CRC-32 of so many zero bytes, by doubling."""
    crc, length = 0, 0
    for bit in bin(count)[2:]:
        crc, length = crc32_combine(crc, crc, length), 2 * length
        if bit == "1":
            crc, length = crc32(b"\0", crc), length + 1
    return crc


@pytest.mark.parametrize(
    "shape", [(1 << 32, 1), ((1 << 32) - 1,), (5 << 30, 3)], ids=["4 GiB", "4 GiB - 1", "15 GiB"]
)
def test_files_beyond_4_gib_are_laid_out_as_torch_expects(
    folder: Path, shape: tuple[int, ...]
) -> None:
    value = {
        "before": Placeholder("before", (70,), "float32"),
        "large": Placeholder("large", shape, "uint8"),
        "empty": Placeholder("empty", (0,), "float32"),
        "after": Placeholder("after", (3,), "float8_e4m3fn"),
        "large too": Placeholder("large too", shape, "int8"),
        "last": Placeholder("last", (5, 7), "bfloat16"),
    }
    assert crc32(bytes(1000)) == zeros_crc(1000)
    layout = plan(value, "x")
    path = folder / "sparse.pt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, content in layout.headers(
            {key: zeros_crc(record.nbytes) for key, record in layout.records.items()}
        ):
            file.seek(offset)
            file.write(content)
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert [sizes[f"x/data/{n}"] for n in range(6)] == [
            record.nbytes for record in layout.records.values()
        ]
        for name in ("x/data/0", "x/data/2", "x/data/3", "x/data/5", "x/version"):
            archive.read(name)  # checks the CRC
    loaded = read(path)
    assert isinstance(loaded, dict)
    offsets = {key: record.offset for key, record in layout.records.items()}
    assert {key: tensor.offset for key, tensor in loaded.items()} == offsets
    with FakeTensorMode():
        fake = torch.load(path, weights_only=True)
    assert {
        key: tensor.untyped_storage()._checkpoint_offset for key, tensor in fake.items()
    } == offsets
    reader = torch._C.PyTorchFileReader(str(path))
    assert [reader.get_record_offset(f"data/{n}") for n in range(6)] == list(offsets.values())
    path.unlink()


def test_torch_computes_the_offsets_that_were_planned(folder: Path) -> None:
    layout = plan(EXAMPLE, "a root of another length")
    write(layout, folder / "offsets.pt")
    with torch.serialization.safe_globals([Namespace]), FakeTensorMode():
        fake = torch.load(folder / "offsets.pt", weights_only=True)
    for key, tensor in fake["model"].items():
        assert tensor.untyped_storage()._checkpoint_offset == layout.records[key].offset


@pytest.mark.slow
def test_a_file_of_70000_records_is_written_and_read(folder: Path) -> None:
    layout = plan([Placeholder(str(n), (1,), "uint8") for n in range(70_000)], "x")
    path = folder / "many.pt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, content in layout.headers(dict.fromkeys(layout.records, 0)):
            file.seek(offset)
            file.write(content)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 70_006
    assert (
        torch._C.PyTorchFileReader(str(path)).get_record_offset("data/69999")
        == layout.records["69999"].offset
    )
    found = read_directory(InputFile.open(path))
    assert [found[f"x/data/{n}"].offset for n in range(70_000)] == [
        record.offset for record in layout.records.values()
    ]


class Subclass(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1, 2}, 1j, np.float64(1), np.zeros(2), torch.zeros(2), Path("x"), Subclass(), OrderedDict,
     TorchDtype("qint8"), TorchDtype("x\ncos\nsystem"), Placeholder("x", (1,), "int4"), Global("os", "system")],
    ids=repr,
)  # fmt: skip
def test_values_that_torch_might_not_load_are_not_written(value: object) -> None:
    with pytest.raises(TypeError, match="can't write"):
        dumps({"args": [value]})


def test_numbers_that_do_not_fit_are_not_written() -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        dumps(1 << 2040)


def test_two_tensors_with_one_key_are_not_written() -> None:
    with pytest.raises(ValueError, match="the key 'w'"):
        plan([Placeholder("w", (1,), "uint8"), Placeholder("w", (2,), "uint8")], "x")


@pytest.mark.parametrize("root", ["", "..", ".", "a/b", "a\\b", "c:"])
def test_a_root_that_is_no_folder_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="folder inside"):
        plan([], root)


# ---- broken files ----


def stored(members: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def refused(path: Path, message: str, error: type[CheckpointError] = CorruptCheckpoint) -> None:
    with pytest.raises(error, match=message) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))


def pickled(
    storage: bytes = b"FloatStorage", elements: int = 4, key: bytes = b"0",
    offset: int = 0, shape: int = 4, stride: int = 1,
) -> bytes:  # fmt: skip
    """A data.pkl with one vector."""
    start, rows, step = (b"J" + struct.pack("<i", number) for number in (offset, shape, stride))
    name = b"X" + struct.pack("<I", len(key)) + key + b"X\x03\0\0\0cpu"
    identity = (
        b"(X\x07\0\0\0storagectorch\n"
        + storage
        + b"\n"
        + name
        + b"J"
        + struct.pack("<i", elements)
        + b"tQ"
    )
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + identity
        + start
        + rows
        + b"\x85"
        + step
        + b"\x85\x89}tR."
    )


def members(data: bytes | None = None, storage: bytes = bytes(16)) -> dict[str, bytes]:
    return {
        "x/data.pkl": pickled() if data is None else data,
        "x/data/0": storage,
        "x/version": b"3\n",
    }


def test_the_file_that_the_broken_ones_are_made_of_is_good(folder: Path) -> None:
    assert_same(torch.zeros(4), read(stored(members(), folder / "good.pt")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a torch zip file nor"),
        (bytes(1000), "neither a torch zip file nor"),
        (pickle.dumps({"a": 1}), "neither a torch zip file nor"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "Git LFS pointer.*git lfs pull",
        ),
        (b"PK\3\4" + bytes(100), "without a valid directory"),
    ],
)
def test_files_that_torch_did_not_write_are_refused(
    folder: Path, content: bytes, message: str
) -> None:
    path = folder / "other.pt"
    path.write_bytes(content)
    refused(path, message)


def test_a_file_that_is_not_there_is_refused(folder: Path) -> None:
    refused(folder / "nowhere.pt", "no such file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (members(pickled(elements=5)), "storage '0' .5 elements of float32. has 16 bytes"),
        (members(pickled(key=b"1")), "storage '1' .* is missing"),
        (members(pickled(key=b"../0")), "is missing"),
        (
            members(pickled(offset=1)),
            r"a tensor \[4\] of float32 reaches past the end of its storage of 16 bytes",
        ),
        (members(pickled(shape=5)), "reaches past the end of its storage"),
        (members(pickled(stride=2)), "reaches past the end of its storage"),
        (
            members(pickled(shape=2**31 - 1, stride=2**31 - 1)),
            "reaches past the end of its storage",
        ),
        (members(pickled(stride=0)), "expanded"),
        (members(pickled(shape=5, stride=0)), "more elements than its storage"),
        (members(pickled(offset=-1)), "natural numbers"),
        (members(pickled(shape=-1)), "natural numbers"),
        (members(pickled(stride=-1)), "natural numbers"),
        (members(pickled(elements=-1)), "something that is not a storage"),
        (members(pickled(storage=b"Tensor")), "something that is not a storage"),
        (members(pickled(storage=b"QInt8Storage")), "tensors of this type can't be read"),
        (members(b"K\x07Q."), "something that is not a storage"),
        (members(b"\x80\x02"), "broken pickle"),
        (members() | {"x/byteorder": b"big"}, "big-endian"),
        (members() | {"y/data.pkl": b"N."}, "not one of torch.save"),
        ({"x/data/0": b""}, "not one of torch.save"),
        (members() | {"../evil": b""}, "leads out of the archive"),
        (members() | {"/etc/passwd": b""}, "leads out of the archive"),
        (members() | {"x/..": b""}, "leads out of the archive"),
        (members() | {"x/a\\b": b""}, "leads out of the archive"),
        (members() | {"c:/x": b""}, "leads out of the archive"),
    ],
)
def test_a_zip_file_that_cannot_be_right_is_refused(
    folder: Path, content: dict[str, bytes], message: str
) -> None:
    refused(stored(content, folder / "broken.pt"), message)


def test_a_program_is_refused_and_not_executed(folder: Path) -> None:
    marker = folder / "executed"
    command = f"touch {marker}".encode()
    program = b"cposix\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."
    refused(
        stored(members(program), folder / "program.pt"), "asks to call posix.system", UnsafeContent
    )
    legacy = folder / "legacy_program.pt"
    legacy.write_bytes(legacy_bytes(program))
    refused(legacy, "asks to call posix.system", UnsafeContent)
    assert not marker.exists()


def test_a_compressed_record_is_refused(folder: Path) -> None:
    path = folder / "compressed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members().items():
            archive.writestr(name, content)
    refused(path, "'x/version' is compressed; use torch.save on a state_dict")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(folder: Path) -> None:
    path = folder / "duplicate.pt"
    stored(members(), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(16))
    refused(path, "duplicate entries called 'x/data/0'")


def test_a_symbolic_link_is_refused(folder: Path) -> None:
    path = stored(members(), folder / "link.pt")
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("x/link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    refused(path, "leads out of the archive")


def changed(folder: Path, change: Callable[[bytearray], None]) -> Path:
    path = stored(members(), folder / "changed.pt")
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def central(content: bytes, number: int = 0) -> int:
    start = struct.unpack("<I", content[-6:-2])[0]
    for _ in range(number):
        start = content.index(b"PK\1\2", start + 4)
    return int(start)


def put(content: bytearray, offset: int, value: bytes) -> None:
    content[offset : offset + len(value)] = value


def grow(content: bytearray, sizes: bytes) -> None:
    put(content, 18, sizes)
    put(content, central(content) + 20, sizes)


CONTRADICTIONS: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "encrypted": (lambda c: put(c, central(c) + 8, b"\1"), "is encrypted"),
    "encrypted locally": (lambda c: put(c, 6, b"\1"), "two descriptions that differ"),
    "compressed locally": (lambda c: put(c, 8, b"\x08"), "two descriptions that differ"),
    "another local name": (lambda c: put(c, 30, b"y"), "two descriptions that differ"),
    "a longer local name": (lambda c: put(c, 26, b"\xff"), "two descriptions that differ"),
    "another local size": (lambda c: put(c, 22, b"\1"), "two descriptions that differ"),
    "another local checksum": (lambda c: put(c, 14, b"abcd"), "two descriptions that differ"),
    "no local header": (lambda c: put(c, central(c, 1) + 42, struct.pack("<I", 1)), "two descriptions that differ|overlaps"),
    "another name in the directory": (lambda c: put(c, central(c) + 46, b"y"), "two descriptions that differ"),
    "a header beyond the end": (lambda c: put(c, central(c) + 42, b"\xff\xff\xff\x00"), "were expected"),
    "a pickle that changed": (lambda c: put(c, 45, b"?"), "checksum"),
    "a record that overlaps the next": (lambda c: grow(c, b"\xff\1\0\0" * 2), "overlaps another"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_zip_file_that_contradicts_itself_is_refused(folder: Path, name: str) -> None:
    change, message = CONTRADICTIONS[name]
    refused(changed(folder, change), message)


@pytest.mark.parametrize("zipped", [True, False])
def test_every_truncation_is_refused(folder: Path, zipped: bool) -> None:
    path = folder / "whole.pt"
    torch.save(
        {"w": torch.ones(3), "args": Namespace(a=1)}, path, _use_new_zipfile_serialization=zipped
    )
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptCheckpoint):
            read(path)


# ---- files before torch 1.6 ----


def legacy_bytes(
    value: bytes,
    names: object = (),
    storages: bytes = b"",
    protocol: int = 1001,
    little: bool = True,
) -> bytes:
    system = {
        "protocol_version": 1001,
        "little_endian": little,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    head = [0x1950A86A20F9469CFC6C, protocol, system]
    return (
        b"".join(pickle.dumps(part, 2) for part in head) + value + pickle.dumps(names, 2) + storages
    )


def legacy_pickle(view: bytes = b"N", shape: int = 4) -> bytes:
    return pickled(shape=shape).replace(b"tQ", view + b"tQ")


ZEROS = struct.pack("<q", 4) + bytes(16)


def test_a_view_of_a_very_old_file_is_read(folder: Path) -> None:
    path = folder / "view.pt"
    storage = struct.pack("<q4f", 4, 1, 2, 3, 4)
    path.write_bytes(legacy_bytes(legacy_pickle(b"X\1\0\0\0vK\1K\2\x87", shape=2), ["0"], storage))
    assert_same(torch.tensor([2.0, 3.0]), read(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (legacy_bytes(legacy_pickle(), ["0"], ZEROS, protocol=1000), "not of protocol 1001"),
        (legacy_bytes(legacy_pickle(), ["0"], ZEROS, little=False), "big-endian"),
        (legacy_bytes(legacy_pickle(), [], ZEROS), "don't match its tensors"),
        (legacy_bytes(legacy_pickle(), ["0", "0"], ZEROS), "don't match its tensors"),
        (legacy_bytes(legacy_pickle(), [0], ZEROS), "don't match its tensors"),
        (legacy_bytes(legacy_pickle(), "0", ZEROS), "don't match its tensors"),
        (
            legacy_bytes(legacy_pickle(), ["0"], struct.pack("<q", 3) + bytes(16)),
            "3 elements of float32, expected 4",
        ),
        (legacy_bytes(legacy_pickle(), ["0"], ZEROS[:-1]), "bytes but needs"),
        (legacy_bytes(legacy_pickle(), ["0"], b""), "were expected"),
        (
            legacy_bytes(legacy_pickle(b"X\1\0\0\0vK\2K\3\x87", shape=2), ["0"], ZEROS),
            "view that reaches past",
        ),
        (legacy_bytes(legacy_pickle(b"K\1", shape=2), ["0"], ZEROS), "view that reaches past"),
        (legacy_bytes(legacy_pickle(shape=5), ["0"], ZEROS), "reaches past the end of its storage"),
        (legacy_bytes(b"\x80\x02", ["0"], ZEROS), "broken pickle"),
    ],
)
def test_an_old_file_that_cannot_be_right_is_refused(
    folder: Path, content: bytes, message: str
) -> None:
    path = folder / "old.pt"
    path.write_bytes(content)
    refused(path, message)


# ---- damage ----


def damaged(zipped: bool, folder: Path) -> bytes:
    path = folder / "damaged.pt"
    tensors = {"w": torch.arange(6.0).view(2, 3).t(), "f": torch.zeros(2, dtype=torch.float8_e5m2)}
    value = {**tensors, "args": Namespace(a=[1, "b"])}
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path.read_bytes()


@settings(max_examples=250, deadline=None)
@given(zipped=st.booleans(), data=st.data())
def test_any_changed_byte_gives_a_value_or_our_error(
    folder: Path, zipped: bool, data: st.DataObject
) -> None:
    content = bytearray(damaged(zipped, folder))
    change = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for index, byte in data.draw(st.lists(change, min_size=1, max_size=4)):
        content[index] = byte
    (folder / "damaged.pt").write_bytes(content)
    with suppress(CheckpointError):
        for value in read(folder / "damaged.pt").values():  # type: ignore[attr-defined]
            if isinstance(value, (FileTensor, StridedTensor)):
                read_tensor(value)


def test_reading_leaves_no_file_open(folder: Path) -> None:
    torch.save([torch.ones(3)], folder / "closed.pt")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept = [read(folder / "closed.pt") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert_same([torch.ones(3)], kept[0])
