"""File systems without preallocation, or without renames of directories: simulated, and real ones where they can be mounted."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats import allocation
from formats.errors import CheckpointError
from formats.staged_file import StagedFile
from formats.staging import Staging
from tests.models import write_llama
from tests.runs import assert_refused, run, snapshot, unchanged

MEGABYTE = 1 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


def fill(target: Path) -> None:
    target.mkdir()
    (target / "weights").write_bytes(b"old")


def mounted(place: Path, *words: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    try:
        done = (
            subprocess.run(
                ["mount", *words, str(place)], capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        done = False
    if not done:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def ext2(tmp_path: Path) -> Iterator[Path]:
    """Sixteen megabytes of a file system that has no fallocate(2)."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * MEGABYTE)
    maker = shutil.which("mkfs.ext2", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if maker is None:
        pytest.skip("mkfs.ext2 is not installed")
    subprocess.run([maker, "-q", str(image)], check=True)
    yield from mounted(tmp_path / "mounted", "-o", "loop", str(image))


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A file system in which an old output lies on a lower layer, whose directories can't be renamed."""
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    fill(tmp_path / "lower" / "out")
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work,redirect_dir=off"
    yield from mounted(tmp_path / "mounted", "-t", "overlay", "-o", layers, "overlay")


# Preallocation.


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_gets_its_size_where_its_space_can_not_be_reserved(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    def never(*arguments: object) -> None:
        raise AssertionError("which writes one byte into every page")

    monkeypatch.setattr(allocation, "fallocate", unsupported)
    monkeypatch.setattr(os, "posix_fallocate", never)
    file = StagedFile(tmp_path / "x", 10 * MEGABYTE, keep=False)
    file.close()
    assert (tmp_path / "x").stat().st_size == 10 * MEGABYTE
    assert (tmp_path / "x").stat().st_blocks == 0


def test_the_space_of_a_file_is_reserved_where_it_can_be(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        try:
            allocation.fallocate(file.fileno(), MEGABYTE)
        except OSError as error:
            pytest.skip(f"this file system has no preallocation: {error.strerror}")
    status = (tmp_path / "x").stat()
    assert (status.st_size, status.st_blocks * 512 >= MEGABYTE) == (MEGABYTE, True)


def test_a_file_system_that_has_no_preallocation_is_not_written_a_byte_a_page(ext2: Path) -> None:
    with (ext2 / "probe").open("wb") as file, pytest.raises(OSError, match="not supported"):
        allocation.fallocate(file.fileno(), MEGABYTE)
    file = StagedFile(ext2 / "x", 8 * MEGABYTE, keep=False)
    assert (ext2 / "x").stat().st_size == 8 * MEGABYTE
    assert (ext2 / "x").stat().st_blocks * 512 < MEGABYTE // 16
    file.write(MEGABYTE, b"abc")
    file.close()
    assert (ext2 / "x").read_bytes()[MEGABYTE : MEGABYTE + 4] == b"abc\0"


def test_a_conversion_succeeds_on_a_file_system_without_preallocation(
    ext2: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", layers=2)
    assert run("convert", model, ext2 / "out", "--saver", "core", "--verify").status == 0
    assert run("diff", model, ext2 / "out").status == 0


# Renames.


def refusing(monkeypatch: pytest.MonkeyPatch, code: int, what: Path | None = None) -> None:
    """Renames of any directory fail, or of one alone."""
    rename = Path.rename

    def refused(old: Path, new: Path) -> Path:
        if old == what or (what is None and old.is_dir()):
            raise OSError(code, os.strerror(code))
        return rename(old, new)

    monkeypatch.setattr(Path, "rename", refused)


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EIO, errno.EMFILE]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_system_that_renames_no_directories_is_found_before_anything_is_written(
    code: int, resume: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, code)
    with unchanged(target.parent):
        output = Staging(target)
        with pytest.raises(
            CheckpointError, match="out: directories can't be renamed there"
        ) as error:
            output.open({"plan": "a"}, resume=resume)
        output.discard()
    assert error.value.code == "no-renames"
    assert os.strerror(code) in str(error.value)


def test_an_old_output_that_can_not_be_moved_is_found_before_anything_is_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(target)
    refusing(monkeypatch, errno.EXDEV, target)
    with unchanged(target.parent):
        output = Staging(target, overwrite=True)
        with pytest.raises(CheckpointError, match="directories can't be renamed there"):
            output.open({"plan": "a"}, resume=False)
        output.discard()


@pytest.mark.parametrize("old", [False, True])
def test_the_probe_leaves_nothing_and_an_old_output_as_it_is(old: bool, target: Path) -> None:
    if old:
        fill(target)
    output = Staging(target, overwrite=True)
    before = snapshot(target) if old else None
    output.open({"plan": "a"}, resume=False)
    assert sorted(path.name for path in output.root.iterdir()) == ["data", "journal.jsonl", "lock"]
    assert not old or snapshot(target) == before
    output.discard()
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"] * old


def test_a_probe_of_a_killed_run_does_not_disturb_the_next_run(target: Path) -> None:
    first = Staging(target)
    first.open({"plan": "a"}, resume=False)
    first.keep()
    (first.root / "probe" / "there" / "directory").mkdir(parents=True)
    second = Staging(target)
    second.open({"plan": "a"}, resume=True)
    assert not (first.root / "probe").exists()
    second.discard()


def test_an_old_output_on_a_lower_layer_of_an_overlay_is_refused_at_once(
    overlay: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", layers=2)
    old = snapshot(overlay / "out")
    words = ("convert", model, "--saver", "core", "--save-dir")
    (overlay / "out" / "megaconv.json").write_text("{}")
    old = snapshot(overlay / "out")
    outcome = run(*words, overlay / "out", "--overwrite")
    assert_refused(outcome, 1, "directories can't be renamed there (Invalid cross-device link)")
    assert snapshot(overlay / "out") == old
    assert [path.name for path in overlay.iterdir()] == ["out"]
    assert run(*words, overlay / "new").status == 0
    assert run(*words, overlay / "new", "--overwrite").status == 0
