"""Writing that fails: a full disk, and an error at every single call that writes, syncs or renames."""

import contextlib
import errno
import fcntl
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from formats import allocation, renames
from megaconv.engine.conversion import convert, fingerprint
from megaconv.errors import CheckpointError, NotEnoughSpace
from megaconv.options import ConvertOptions, SaveOptions
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run, snapshot, unchanged, write_old_output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2)


# A full disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_demo_on_a_full_disk_leaves_no_part_of_a_model(small_disk: Path) -> None:
    outcome = run("demo", "--dir", small_disk / "demo")
    assert (outcome.status, outcome.err.count("\n")) == (5, 1)
    assert f"{small_disk / 'demo' / 'llama'}: the disk is full" in outcome.err
    assert list((small_disk / "demo").iterdir()) == []


@pytest.mark.parametrize("saver", ["core", "hf"])
def test_an_output_larger_than_the_free_space_is_refused_before_it_is_begun(
    tmp_path: Path, small_disk: Path, saver: str
) -> None:
    model = write_llama(tmp_path / "model", vocab=10_000)
    with unchanged(tmp_path):
        outcome = run(
            "convert", "--load-dir", model, "--saver", saver, "--save-dir", small_disk / "out"
        )
        assert_refused(outcome, 5, "bytes are needed", str(small_disk))


def test_a_disk_that_fills_up_meanwhile_ends_the_run(tmp_path: Path, small_disk: Path) -> None:
    """With --resume there is no check beforehand, because a part of the output may be there already."""
    model = write_llama(tmp_path / "model", vocab=10_000)
    with unchanged(tmp_path):
        outcome = run(
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            small_disk / "out",
            "--resume",
        )
        assert_refused(outcome, 5, "full", str(small_disk))


def test_a_disk_that_is_full_for_small_files_too_ends_the_run(
    tmp_path: Path, small_disk: Path, model: Path
) -> None:
    (small_disk / "filling").write_bytes(bytes((1 << 20) - 4096))
    with unchanged(tmp_path):
        outcome = run(
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            small_disk / "out",
            "--resume",
        )
        assert_refused(outcome, 5, "full", str(small_disk))


def test_a_limit_on_file_sizes_ends_the_run(model: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    with unchanged(tmp_path):
        outcome = finish(
            start(
                "convert",
                "--load-dir",
                model,
                "--saver",
                "core",
                "--save-dir",
                tmp_path / "out",
                before=limit,
            )
        )
        assert_refused(outcome, 1, "model_optim_rng.pt", "File too large")


# An error at the n-th call.


class Call(NamedTuple):
    """A function that is made to fail."""

    owner: Any
    name: str


CALLS = [
    Call(os, "pwrite"), Call(allocation, "fallocate"), Call(os, "fsync"), Call(Path, "rename"), Call(Path, "mkdir"),
]  # fmt: skip


class Faulty:
    """Counts calls from any thread, and raises instead of the one with the given number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Call, number: int, code: int) -> None:
        self._call: Callable[..., Any] = getattr(call.owner, call.name)
        self._number, self._code = number, code
        self._lock = threading.Lock()
        self.calls = 0
        monkeypatch.setattr(
            call.owner, call.name, lambda *arguments, **options: self(*arguments, **options)
        )

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            self.calls += 1
            if self.calls == self._number:
                raise OSError(self._code, os.strerror(self._code))
        return self._call(*arguments, **options)


def numbers(count: int) -> Iterator[int]:
    """1, 2, 3 … with growing gaps, and the last ones, at which things end."""
    return (
        number
        for number in range(1, count + 1)
        if number <= 12 or number > count - 12 or number % 7 == 0
    )


def convert_with_faults(
    model: Path, target: Path, call: Call, code: int, expected: type[Exception]
) -> int:
    """Fail at one call after the other; returns their number. Nothing may be left but what was there before."""
    options = ConvertOptions(save=SaveOptions(tp=2, pp=2), overwrite=target.exists(), workers=2)
    (target.parent / "counted").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        counter = Faulty(patch, call, 0, code)
        convert(model, target.parent / "counted" / "out", "core", options)
    for number in numbers(counter.calls):
        with unchanged(target.parent), pytest.MonkeyPatch.context() as patch:
            faulty = Faulty(patch, call, number, code)
            with pytest.raises(expected) as raised:
                convert(model, target, "core", options)
            assert faulty.calls >= number
            assert os.strerror(code) in str(raised.value) or expected is NotEnoughSpace
    convert(model, target, "core", options)
    assert run("diff", model, target).status == 0
    assert sorted(path.name for path in target.parent.iterdir()) == sorted(
        {"counted", "model", target.name}
    )
    return counter.calls


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("there", ["nothing", "an empty directory", "an old output"])
def test_an_error_at_any_call_leaves_the_target_as_it_was(
    model: Path, tmp_path: Path, call: Call, there: str
) -> None:
    target = tmp_path / "out"
    if there == "an empty directory":
        target.mkdir()
    if there == "an old output":
        write_old_output(target)
    if (call.name, there) == ("rename", "an old output"):
        pytest.skip("an old output is exchanged")
    assert convert_with_faults(model, target, call, errno.EIO, CheckpointError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", CALLS[:3], ids=lambda call: call.name)
def test_a_full_disk_at_any_call_is_reported_as_a_full_disk(
    model: Path, tmp_path: Path, call: Call, code: int
) -> None:
    assert convert_with_faults(model, tmp_path / "out", call, code, NotEnoughSpace) > 4


EITHER_WAY = [
    Call(os, "open"), Call(os, "close"), Call(os, "fstat"), Call(os, "stat"), Call(os, "lstat"), Call(os, "unlink"), Call(os, "rmdir"),
    Call(os, "scandir"), Call(fcntl, "flock"), Call(Path, "unlink"), Call(Path, "rmdir"), Call(Path, "iterdir"), Call(Path, "open"),
]  # fmt: skip
"""Calls whose errors a run survives at some moments, and ends with at others."""


@pytest.mark.parametrize("call", EITHER_WAY, ids=lambda call: f"{call.owner.__name__}.{call.name}")
@pytest.mark.parametrize("old", [False, True])
def test_an_error_at_any_other_call_ends_the_run_or_is_survived_and_leaves_nothing(
    model: Path, tmp_path: Path, call: Call, old: bool
) -> None:
    """The output is there if, and only if, the run says so."""
    target, options = tmp_path / "out", ConvertOptions(overwrite=old, workers=1)
    number = reached = 0
    while reached >= number:
        number += 1
        if old:
            write_old_output(target)
        before = snapshot(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            faulty = Faulty(patch, call, number, errno.EIO)
            failure = None
            try:
                convert(model, target, "core", options)
            except (CheckpointError, OSError) as error:
                failure = str(error)
            reached = faulty.calls
        if failure is not None:
            assert os.strerror(errno.EIO) in failure
            assert snapshot(tmp_path) == before, number
        else:
            assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"], number
            assert fingerprint(target) == fingerprint(model)
        shutil.rmtree(target, ignore_errors=True)
    assert number > 1


def test_without_an_exchange_in_one_step_an_old_output_is_replaced_in_two(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system can't exchange names, an error at any rename still leaves the old output."""
    monkeypatch.setattr(renames, "exchange", lambda left, right: False)
    write_old_output(tmp_path / "out")
    before = snapshot(tmp_path)
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, Call(Path, "rename"), number, errno.EIO)
            with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
                convert(model, tmp_path / "out", "core", ConvertOptions(overwrite=True))
        assert snapshot(tmp_path) == before
    convert(model, tmp_path / "out", "core", ConvertOptions(overwrite=True))
    assert run("diff", model, tmp_path / "out").status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def open_files(below: Path) -> list[str]:
    """Paths of this process's open files."""
    links = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    return sorted(str(link) for link in links if below in link.parents)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    "call", [Call(allocation, "fallocate"), Call(os, "pwrite"), Call(os, "fsync"), None]
)
def test_no_file_stays_open_whether_a_run_fails_or_not(
    model: Path, tmp_path: Path, call: Call | None
) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CheckpointError):
        if call is not None:
            Faulty(patch, call, 2, errno.EIO)
        convert(model, tmp_path / "out", "core", ConvertOptions(save=SaveOptions(tp=2)))
    gc.collect()
    assert open_files(tmp_path) == []


def test_a_file_system_without_preallocation_will_do(model: Path, tmp_path: Path) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "fallocate", unsupported)
        convert(model, tmp_path / "out", "core", ConvertOptions())
    assert run("diff", model, tmp_path / "out").status == 0


def test_writes_that_take_only_a_part_are_continued(model: Path, tmp_path: Path) -> None:
    pwrite = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os,
            "pwrite",
            lambda descriptor, data, offset: pwrite(descriptor, data[: 1 + len(data) // 3], offset),
        )
        convert(model, tmp_path / "out", "core", ConvertOptions())
    assert run("diff", model, tmp_path / "out").status == 0
