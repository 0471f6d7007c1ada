"""Files that somebody else wrote: regular ones alone, up to a ceiling, and never waited for."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from formats import dcp_metadata, rank_files, safetensors, torch_dist, torch_zip, zarr_arrays
from formats.ceilings import (
    CONFIG_BYTES,
    HEADER_BYTES,
    HEADER_VALUES,
    INDEX_BYTES,
    JSON_DEPTH,
    JSON_VALUE_BYTES,
    JSON_VALUES,
    TRACKER_BYTES,
)
from formats.errors import CorruptCheckpoint
from formats.regular_files import open_regular, parse_json, read_json, read_small, regular_size


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Whoever waits for a pipe is woken up by an alarm, and fails."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


STRANGE: dict[str, Callable[[Path], None]] = {
    "a named pipe": pipe,
    "a device": device,
    "a directory": folder,
    "a socket": unix_socket,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("opened", [regular_size, open_regular, lambda path: read_small(path, 9)])
def test_a_path_that_is_no_regular_file_is_refused_by_its_kind(
    opened: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    STRANGE[kind](tmp_path / "x")
    with pytest.raises(CorruptCheckpoint, match=f"x: is {kind}, where a file should be"):
        opened(tmp_path / "x")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "index": ("model.safetensors.index.json", safetensors.read_index),
    "safetensors": ("model.safetensors", safetensors.read),
    "torch": ("pytorch_model.bin", torch_zip.read),
    "dcp": (".metadata", dcp_metadata.read),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_what_is_no_regular_file(
    reader: str, kind: str, tmp_path: Path
) -> None:
    name, read = READERS[reader]
    STRANGE[kind](tmp_path / name)
    with pytest.raises(CorruptCheckpoint, match=kind):
        read(tmp_path / name)


@pytest.mark.parametrize("kind", STRANGE)
def test_detection_ignores_names_that_are_no_regular_files(kind: str, tmp_path: Path) -> None:
    for name in (rank_files.TRACKER, torch_dist.FORMAT_FILE, ".metadata"):
        STRANGE[kind](tmp_path / name)
    assert rank_files.find_version(tmp_path) is None
    assert torch_dist.read_backend(tmp_path) is None
    assert not torch_dist.is_dcp(tmp_path)


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_small(tmp_path / "link", 3) == b"abc"
    assert regular_size(tmp_path / "link") == 3


@pytest.mark.parametrize("name", ["none", "none/x", "y" * 300, "a\0b", "\udcff" * 3])
def test_a_missing_file_is_reported(name: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no such file"):
        read_small(tmp_path / name, 9)


def test_a_file_above_its_ceiling_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(9))
    assert read_small(tmp_path / "x", 9) == bytes(9)
    with pytest.raises(
        CorruptCheckpoint, match="x: has 9 bytes; no file of this kind has more than 8"
    ):
        read_small(tmp_path / "x", 8)


def test_a_file_that_says_it_is_empty_is_read_to_its_ceiling_only() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert b"Name:" in read_small(Path("/proc/self/status"), 1 << 20)
    with pytest.raises(CorruptCheckpoint, match="has 9 bytes"):
        read_small(Path("/proc/self/status"), 8)


@pytest.mark.parametrize(
    ("name", "ceiling", "read"),
    [
        (rank_files.TRACKER, TRACKER_BYTES, rank_files.find_version),
        (torch_dist.FORMAT_FILE, CONFIG_BYTES, torch_dist.read_backend),
        (
            "model.safetensors.index.json",
            INDEX_BYTES,
            lambda path: safetensors.read_index(path / READERS["index"][0]),
        ),
        ("array/.zarray", CONFIG_BYTES, zarr_arrays.open_directory),
    ],
)
def test_every_metadata_file_has_a_ceiling(
    name: str, ceiling: int, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    with (tmp_path / name).open("wb") as file:
        file.truncate(ceiling + 1)
    with pytest.raises(
        CorruptCheckpoint, match=f"has {ceiling + 1:,} bytes; no file of this kind has more than"
    ):
        read(tmp_path)


def test_invalid_json_is_reported(tmp_path: Path) -> None:
    for content in (b"{", b"\xff", b"[" * 100_000, b"1" * 5000):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match="x: is not a readable JSON file"):
            read_json(tmp_path / "x", 1 << 20)


def test_json_within_its_ceilings_is_read() -> None:
    assert parse_json(json.dumps(["é", {"a": 1}]).encode()) == ["é", {"a": 1}]
    assert len(parse_json(b"[" + b"0," * (JSON_VALUES - 2) + b"0]")) == JSON_VALUES - 1
    deepest = b"[" * JSON_DEPTH + b"]" * JSON_DEPTH
    assert json.dumps(parse_json(deepest)).encode() == deepest


def test_json_may_have_any_number_of_values_if_it_has_bytes_for_them() -> None:
    merges = 600_000
    found = parse_json(b'{"merges":[' + b'["ab","c"],' * merges + b"[]]}")
    assert len(found["merges"]) == merges + 1


def test_json_of_brackets_alone_is_refused() -> None:
    dense = b"[" + b"0," * (2 * JSON_VALUES * JSON_VALUE_BYTES) + b"0]"
    for content in (dense, b"[" + b"{}," * (2 * JSON_VALUES * JSON_VALUE_BYTES) + b"0]"):
        with pytest.raises(ValueError, match="more than any checkpoint has"):
            parse_json(content)


def test_json_of_more_levels_than_any_checkpoint_has_is_refused() -> None:
    lists = b"[" * (JSON_DEPTH + 1) + b"]" * (JSON_DEPTH + 1)
    objects = b'{"a":' * (JSON_DEPTH + 1) + b"0" + b"}" * (JSON_DEPTH + 1)
    for content in (lists, objects):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json(content)


WORST: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: (
        b"[" + b",".join([b"[" * 50 + b"]" * 50] * (HEADER_BYTES // 101)) + b"]"
    ),
    "empty objects": lambda: b"[" + b"{}," * (HEADER_BYTES // 3 - 2) + b"{}]",
    "objects": lambda: b"[" + b'{"":0},' * ((HEADER_VALUES - 3) // 3) + b"0]",
    "short lists": lambda: b"[" + b"[[0]]," * ((HEADER_VALUES - 3) // 3) + b"0]",
    "keys": lambda: (
        b"{"
        + b",".join(b'"%x":{"":0}' % number for number in range((HEADER_VALUES - 3) // 4))
        + b"}"
    ),
    "texts": lambda: (
        b"[" + b",".join('"ā%x"'.encode() % number for number in range(HEADER_VALUES - 3)) + b"]"
    ),
    "one wide text": lambda: b'["' + "𝔸".encode() + b"x" * (HEADER_BYTES - 9) + b'"]',
    "a long shape": lambda: (
        b'{"a":{"dtype":"U8","shape":['
        + b"9000000000000000000," * 300_000
        + b'1],"data_offsets":[0,0]}}'
    ),
    "tensors": lambda: (
        b"{"
        + b",".join(
            b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number
            for number in range(124_000)
        )
        + b"}"
    ),
}
"""Made when a test runs: millions of values, which every process that collects tests would make too."""


@pytest.mark.parametrize("case", WORST)
def test_no_header_takes_half_a_gigabyte_or_ten_seconds(case: str, tmp_path: Path) -> None:
    """Measured in a process of its own, whose memory is limited besides."""
    header = WORST[case]()
    assert len(header) <= HEADER_BYTES
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    code = (
        "import sys; from pathlib import Path; from formats import safetensors\n"
        "try: safetensors.read(Path(sys.argv[1]))\n"
        "except Exception as error: assert type(error).__name__ == 'CorruptCheckpoint', error\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.safetensors")]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert int(done.stdout) < 500_000
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - seconds < 10
