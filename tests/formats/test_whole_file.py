"""Small files that appear complete or not at all, with the size limit of a process in place of a full disk."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from formats.errors import CheckpointError
from formats.whole_file import whole_file, write_whole
from tests.models import write_llama

LIMIT_BYTES = 20_000


def limited(*words: object) -> "subprocess.CompletedProcess[str]":
    """Run megaconv in a process that can't write larger files than LIMIT_BYTES."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))

    command = [sys.executable, "-m", "megaconv", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)


def test_a_page_that_cant_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    model, page = write_llama(tmp_path / "model"), tmp_path / "page.html"
    older = "<!doctype html>an older page"
    page.write_text(older)
    outcome = limited("inspect", model, "--html", page)
    message = f"megaconv: error: {page}: can't be written: File too large\n"
    assert (outcome.returncode, outcome.stderr) == (1, message)
    assert page.read_text() == older
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "page.html"]


def test_a_sparse_update_that_cant_be_written_names_its_place(tmp_path: Path) -> None:
    old, new = write_llama(tmp_path / "old"), write_llama(tmp_path / "new", seed=1)
    out = tmp_path / "update"
    outcome = limited("delta", old, new, "--sparse", "vllm", "--save-dir", out)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith(f"megaconv: error: {tmp_path}/.update.megaconv-partial")
    assert outcome.stderr.endswith(": can't be written: File too large\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_device_gets_the_bytes(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), b"new")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(CheckpointError, match="disk is full"):
        write_whole(Path("/dev/full"), b"new")


def test_a_file_that_is_written_in_parts_appears_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        file.write(b"er")
    assert path.read_bytes() == b"newer"
    with pytest.raises(KeyboardInterrupt), whole_file(path):
        raise KeyboardInterrupt
    assert path.read_bytes() == b"newer"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
