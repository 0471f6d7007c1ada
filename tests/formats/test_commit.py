"""The commit, killed before each of its steps: there is the old output or the new one, and the next run puts all in order."""

import ctypes
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from formats import renames
from formats.errors import CheckpointError, TargetExists
from formats.staging import Staging

STEPS = [
    (os, "fsync"), (os, "close"), (Path, "rename"), (renames, "exchange"), (os, "unlink"), (os, "rmdir"),
    (Path, "unlink"), (Path, "rmdir"),
]  # fmt: skip
"""All that a commit does to a disk."""


class Way(NamedTuple):
    """The situation of a commit: the earlier content of the target, and the file system's ability to exchange
    names."""

    old: bool
    exchanges: bool


WAYS = [Way(False, True), Way(True, True), Way(True, False)]


def unsupported(code: int = errno.ENOSYS) -> Callable[..., int]:
    def renameat2(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    return renameat2


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, target: Path) -> Way:
    found: Way = request.param
    if found.old:
        fill(target, "old")
    if not found.exchanges:
        monkeypatch.setattr(renames, "_renameat2", unsupported())
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


def partial(target: Path) -> Path:
    return target.parent / f".{target.name}.megaconv-partial"


def fill(place: Path, content: str) -> None:
    (place / "inner").mkdir(parents=True)
    for name in ("weights", "inner/more"):
        (place / name).write_text(content)


def content(place: Path) -> str | None:
    """The text of a complete output; None if there is no output."""
    if not place.exists():
        return None
    found = {(place / name).read_text() for name in ("weights", "inner/more")}
    assert len(found) == 1, "a mixture"
    return found.pop()


def begin(target: Path, content: str, *, resume: bool) -> Staging:
    """A conversion up to its commit: what an earlier run has finished it doesn't write again."""
    output = Staging(target, overwrite=True)
    done = [
        entry["done"]
        for entry in output.open(
            {"plan": "a"}, resume=resume, sizes={"weights": 3, "inner/more": 3}
        )
    ]
    for name in ("weights", "inner/more"):
        file = output.file(name, len(content), keep=name in done)
        if name not in done:
            file.write(0, content.encode())
            file.sync()
            output.record([{"done": name}])
    return output


class Killer:
    """Counts steps, and ends the process before the one with the given number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.steps, self._number = 0, number
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps == self._number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return step


def commit_killed_before(number: int, target: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Commit in a process of its own, which is killed before a step. Returns True if it got that far."""
    process = os.fork()
    if not process:
        try:
            output = begin(target, "new", resume=True)
            Killer(monkeypatch, number)
            output.commit()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("resume", [True, False])
def test_a_commit_killed_before_any_step_leaves_one_of_the_two_outputs(
    monkeypatch: pytest.MonkeyPatch, target: Path, way: Way, resume: bool
) -> None:
    """The next run never takes the old output for its own."""
    old = "old" if way.old else None
    seen, number = set(), 0
    while True:
        number += 1
        if not commit_killed_before(number, target, monkeypatch):
            break
        there = content(target)
        seen.add(there)
        if there not in (old, "new"):
            assert not way.exchanges
            assert (there, content(partial(target) / "replaced")) == (None, "old")
        output = begin(target, "new", resume=resume)
        assert content(target) in (old, "new"), "put back before anything else is done"
        output.commit()
        assert content(target) == "new"
        assert [path.name for path in target.parent.iterdir()] == ["out"]
        shutil.rmtree(target)
        if way.old:
            fill(target, "old")
    assert number > 10
    assert seen == {old, "new"} | (set() if way.exchanges else {None})


def test_a_journal_is_gone_from_the_disk_before_what_it_vouches_for(
    monkeypatch: pytest.MonkeyPatch, target: Path, way: Way
) -> None:
    output = begin(target, "new", resume=True)
    synced: list[tuple[Path, bool]] = []
    fsync, root = os.fsync, partial(target)

    def note(descriptor: int) -> None:
        synced.append(
            (Path(f"/proc/self/fd/{descriptor}").readlink(), (root / "journal.jsonl").exists())
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    for name in ("appear", "replace"):
        call = getattr(renames, name)
        monkeypatch.setattr(
            f"formats.staging.{name}",
            lambda *paths, call=call: (synced.append((target, True)), call(*paths)),
        )
    output.commit()
    assert synced.index((root, False)) < synced.index((target, True))


# Where names can't be exchanged.


def leave_between_the_renames(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(renames, "_renameat2", unsupported())
    fill(target, "old")
    number = 1
    while commit_killed_before(number, target, monkeypatch) and target.exists():
        number += 1
    assert not target.exists()
    assert content(partial(target) / "replaced") == "old"


def test_an_output_moved_aside_is_put_back_also_without_overwrite(
    monkeypatch: pytest.MonkeyPatch, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_between_the_renames(monkeypatch, target)
    output = Staging(target)
    with pytest.raises(TargetExists, match="already exists"):
        output.open({"plan": "a"}, resume=False)
    output.discard()
    assert f"{target}: was put back" in caplog.text
    assert content(target) == "old"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_an_output_moved_aside_is_kept_while_another_is_in_its_place(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    leave_between_the_renames(monkeypatch, target)
    fill(target, "theirs")
    for _ in range(2):
        output = Staging(target, overwrite=True)
        with pytest.raises(CheckpointError, match=str(partial(target) / "replaced")):
            output.open({"plan": "a"}, resume=False)
        output.discard()
        assert (content(target), content(partial(target) / "replaced")) == ("theirs", "old")
    shutil.rmtree(target)
    begin(target, "new", resume=False).discard()
    assert content(target) == "old"


def test_a_replacement_that_can_not_be_undone_says_where_the_old_output_is(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    monkeypatch.setattr(renames, "_renameat2", unsupported())
    fill(target, "old")
    output = begin(target, "new", resume=False)
    rename, aside = Path.rename, partial(target) / "replaced"

    def only_aside(self: Path, to: Path) -> Path:
        if to != aside:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", only_aside)
        with pytest.raises(CheckpointError, match=f"{os.strerror(errno.EIO)}; .* is at {aside}"):
            output.commit()
        output.discard()
    assert content(aside) == "old"
    begin(target, "new", resume=False).discard()
    assert content(target) == "old"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_only_what_says_that_names_can_not_be_exchanged_is_a_reason_to_rename_twice(
    monkeypatch: pytest.MonkeyPatch, target: Path, code: int
) -> None:
    monkeypatch.setattr(renames, "_renameat2", unsupported(code))
    fill(target, "old")
    begin(target, "new", resume=False).commit()
    assert content(target) == "new"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.EROFS, errno.EBUSY])
def test_any_other_error_of_an_exchange_is_one(
    monkeypatch: pytest.MonkeyPatch, target: Path, code: int
) -> None:
    monkeypatch.setattr(renames, "_renameat2", unsupported(code))
    fill(target, "old")
    output = begin(target, "new", resume=False)
    monkeypatch.setattr(Path, "rename", None)
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        output.commit()
    assert content(target) == "old"


# What others do meanwhile.


@pytest.mark.parametrize("before", ["nothing", "an empty directory", "an old output"])
def test_overwriting_concerns_what_was_there_at_the_beginning(target: Path, before: str) -> None:
    if before == "an empty directory":
        target.mkdir()
    elif before == "an old output":
        fill(target, "old")
    output = begin(target, "new", resume=False)
    if before == "an old output":
        target.rename(target.with_name("elsewhere"))
    shutil.rmtree(target, ignore_errors=True)
    fill(target, "theirs")
    with pytest.raises(TargetExists, match="was put there meanwhile"):
        output.commit()
    output.discard()
    assert content(target) == "theirs"


def test_an_output_that_vanished_meanwhile_is_no_hindrance(target: Path) -> None:
    fill(target, "old")
    output = begin(target, "new", resume=False)
    shutil.rmtree(target)
    output.commit()
    assert content(target) == "new"


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_from_the_first_step_that_can_not_be_given_up_to_the_last(
    monkeypatch: pytest.MonkeyPatch, target: Path, way: Way, number: int
) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt(signum)

    former = signal.signal(number, interrupt)
    try:
        output = begin(target, "new", resume=False)
        remove = Staging._remove_journals

        def interrupted(self: Staging) -> None:
            os.kill(os.getpid(), number)
            remove(self)

        monkeypatch.setattr(Staging, "_remove_journals", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output.commit()
        assert output.committed
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, former)
    assert content(target) == "new"
    assert [path.name for path in target.parent.iterdir()] == ["out"]
