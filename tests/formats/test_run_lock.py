"""One run at a time: what counts as a lock, and what happens where there are none."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CheckpointError, UnsafeContent
from formats.run_lock import RunLock
from formats.staging import Staging


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


def failing(code: int) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def first_then(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first: Callable[[], object]
) -> None:
    """Something happens just before the first call of a function."""
    call, calls = getattr(owner, name), []

    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            first()
        return call(*arguments, **options)

    monkeypatch.setattr(owner, name, called)


def test_a_lock_is_one_runs_alone_until_it_is_released(folder: Path) -> None:
    first, second = RunLock(folder), RunLock(folder)
    first.take()
    with pytest.raises(BlockingIOError):
        second.take()
    assert (first.is_held, second.is_held, second.take_over()) == (True, False, False)
    first.release()
    assert second.take_over()


@pytest.mark.parametrize("again", [True, False])
def test_a_lock_in_a_directory_that_was_removed_meanwhile_is_none(
    monkeypatch: pytest.MonkeyPatch, folder: Path, again: bool
) -> None:
    """The run before removes it between opening and locking, and a third one may have made it again."""
    third = RunLock(folder)

    def remove() -> None:
        shutil.rmtree(folder)
        if again:
            third.take()

    lock = RunLock(folder)
    first_then(monkeypatch, fcntl, "flock", remove)
    if again:
        with pytest.raises(BlockingIOError):
            lock.take()
        assert not lock.is_held
    else:
        lock.take()
        with pytest.raises(BlockingIOError):
            third.take()


def test_a_directory_that_is_removed_before_it_can_be_locked_is_made_again(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    lock = RunLock(folder)
    first_then(monkeypatch, os, "open", lambda: folder.rmdir())
    lock.take()
    assert (folder / "lock").is_file()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL])
def test_a_run_without_file_locks_warns_and_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(code))
    output = Staging(tmp_path / "out")
    output.open({"plan": "a"}, resume=False)
    output.file("file", 1)
    output.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no locks" in caplog.text


def test_without_locks_only_the_first_of_several_processes_removes_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    members = [Staging(tmp_path / "out", member=member) for member in range(2)]
    for member in members:
        member.open({"plan": "a"}, resume=False)
    members[1].discard()
    assert [path.name for path in tmp_path.iterdir()] == [".out.megaconv-partial"]
    members[0].discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("owner", "name"), [(os, "open"), (fcntl, "flock"), (os, "fstat")])
def test_an_error_leaves_no_directory_that_was_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, there: bool
) -> None:
    if there:
        (tmp_path / ".out.megaconv-partial").mkdir()
    before = list(tmp_path.iterdir())
    output = Staging(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(errno.EIO))
        with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
            output.open({"plan": "a"}, resume=False)
    output.discard()
    assert list(tmp_path.iterdir()) == before


# Links.


@pytest.mark.parametrize("dangling", [True, False])
def test_a_staging_directory_that_is_a_link_is_not_entered(tmp_path: Path, dangling: bool) -> None:
    if not dangling:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "precious").touch()
    (tmp_path / ".out.megaconv-partial").symlink_to("home")
    output = Staging(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"\.out\.megaconv-partial"):
        output.open({"plan": "a"}, resume=False)
    output.discard()
    assert (tmp_path / ".out.megaconv-partial").is_symlink()
    assert (tmp_path / "home" / "precious").exists() != dangling


@pytest.mark.parametrize("name", ["data", "data/file", "journal.jsonl", "lock"])
@pytest.mark.parametrize("resume", [True, False])
def test_nothing_is_written_through_a_link_in_it(tmp_path: Path, name: str, resume: bool) -> None:
    before, root = Staging(tmp_path / "out"), tmp_path / ".out.megaconv-partial"
    before.open({"plan": "a"}, resume=False)
    before.file("file", 4).write(0, b"1234")
    before.record([{"n": 1}])
    before.keep()
    (root / name).rename(tmp_path / "theirs")
    (root / name).symlink_to(tmp_path / "theirs")
    untouched = state_of(tmp_path / "theirs")
    output = Staging(tmp_path / "out")
    if name == "lock":
        with pytest.raises(UnsafeContent, match="is a link"):
            output.open({"plan": "a"}, resume=resume)
        return
    assert output.open({"plan": "a"}, resume=resume, sizes={"file": 4}) == []
    output.file("file", 4).write(0, b"4321")
    output.commit()
    assert (tmp_path / "out" / "file").read_bytes() == b"4321"
    assert not (tmp_path / "out").is_symlink()
    assert state_of(tmp_path / "theirs") == untouched


def state_of(path: Path) -> tuple[int, ...]:
    """What a write changes. The time of the last access isn't in it."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns
