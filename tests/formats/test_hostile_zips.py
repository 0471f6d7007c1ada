"""Zip archives that would fill memory, take hours to scan, or hide a pickle from the scan."""

import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from formats import torch_zip
from formats.ceilings import DIRECTORY_BYTES
from formats.errors import CorruptCheckpoint
from formats.pickle_scan import UNSAFE, scan_file


class Program:
    def __reduce__(self) -> object:
        return os.system, ("true",)


def verdicts(path: Path) -> set[str]:
    return {judged for each in scan_file(path) for judged in each.names.values()}


def test_a_directory_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, size = tmp_path / "x.pt", 4 * DIRECTORY_BYTES
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.seek(size)
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, size - 100, 100, 0))
    tracemalloc.start()
    with pytest.raises(CorruptCheckpoint, match="directory at its end"):
        torch_zip.read(path)
    with pytest.raises(CorruptCheckpoint, match="directory at its end"):
        list(scan_file(path))
    assert tracemalloc.get_traced_memory()[1] < DIRECTORY_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED], ids=["xz", "bz2", "zip"]
)
def test_damage_of_a_compressed_archive_is_a_fault(method: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/data.pkl", pickle.dumps([*range(300)]))
    content = path.read_bytes()
    middle = 40 + len("a/data.pkl") + 20
    path.write_bytes(content[:middle] + bytes(20) + content[middle + 20 :])
    with pytest.raises(CorruptCheckpoint, match="is compressed"):
        list(scan_file(path))


def test_compressed_entries_that_overlap_are_not_inflated_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"N0" * 20_000_000 + b"N.")
        archive.filelist *= 500
    start = time.process_time()
    with pytest.raises(CorruptCheckpoint):
        list(scan_file(path))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_pickle_among_the_storages_is_scanned(method: int, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "before.pt")
    path = tmp_path / "x.pt"
    with (
        zipfile.ZipFile(tmp_path / "before.pt") as before,
        zipfile.ZipFile(path, "w", method) as after,
    ):
        for name in before.namelist():
            after.writestr(name, before.read(name))
        after.writestr("before/data/more.pkl", pickle.dumps(Program(), 2))
    assert UNSAFE in verdicts(path)
