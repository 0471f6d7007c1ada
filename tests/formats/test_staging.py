"""All or nothing: in which order things reach the disk, what a resumed run may rely on, who may write at a time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats import renames
from formats.errors import NotEnoughSpace, TargetExists
from formats.journal import Journal
from formats.run_lock import OF_A_RUN, RunLock
from formats.staged_file import StagedFile
from formats.staging import Staging
from megaconv.engine import transfer
from megaconv.engine.conversion import convert
from megaconv.options import ConvertOptions, SaveOptions
from tests.models import write_llama
from tests.runs import snapshot


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


def partial(target: Path) -> Path:
    return target.parent / f".{target.name}.megaconv-partial"


def begin(
    target: Path, *, resume: bool = False, plan: str = "a", overwrite: bool = False
) -> tuple[Staging, list[dict[str, Any]]]:
    opened = Staging(target, overwrite=overwrite)
    return opened, opened.open({"plan": plan}, resume=resume)


# Files.


def test_nothing_is_at_the_target_until_the_commit_and_nothing_but_the_target_after_it(
    target: Path,
) -> None:
    output, _ = begin(target)
    file = output.file("deep/er/file", 6)
    file.write(3, b"def")
    file.write(0, b"abc")
    assert [path.name for path in target.parent.iterdir()] == [".out.megaconv-partial"]
    output.commit()
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "deep" / "er" / "file").read_bytes() == b"abcdef"


def test_a_file_has_its_size_from_the_beginning_and_unwritten_bytes_are_zero(
    target: Path,
) -> None:
    output, _ = begin(target)
    file = output.file("file", 100_000)
    assert file.path.stat().st_size == 100_000
    file.write(50_000, b"x")
    output.commit()
    assert (target / "file").read_bytes() == bytes(50_000) + b"x" + bytes(49_999)


def test_an_empty_file_and_an_empty_output_appear_too(target: Path) -> None:
    output, _ = begin(target)
    output.commit()
    assert list(target.iterdir()) == []
    output, _ = begin(target)
    output.file("file", 0)
    output.commit()
    assert (target / "file").read_bytes() == b""


def test_files_and_directories_have_the_usual_permissions(target: Path) -> None:
    before = os.umask(0o027)
    try:
        output, _ = begin(target)
        output.file("a/file", 1)
        output.commit()
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (target, target / "a", target / "a" / "file")
    }
    assert modes == {"out": 0o750, "a": 0o750, "file": 0o640}


def test_a_discarded_output_leaves_nothing(target: Path) -> None:
    output, _ = begin(target)
    output.file("a/file", 10).write(0, b"x")
    output.discard()
    assert list(target.parent.iterdir()) == []


# The order in which things reach the disk.


class Recorder:
    """Notes every call that writes, syncs or renames, with the path below the test's directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[tuple[str, str]] = []
        self._root = root
        self._watch(monkeypatch, os, "pwrite", self._of_descriptor)
        self._watch(monkeypatch, os, "fsync", self._of_descriptor)
        self._watch(monkeypatch, Path, "rename", self._of_path)
        self._watch(monkeypatch, renames, "exchange", self._of_path)

    def _watch(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, path: Callable[[Any], Path]
    ) -> None:
        call = getattr(owner, name)

        def noted(first: Any, *rest: Any) -> Any:
            self.events.append((name, str(path(first).relative_to(self._root))))
            return call(first, *rest)

        monkeypatch.setattr(owner, name, noted)

    def _of_descriptor(self, descriptor: int) -> Path:
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    def _of_path(self, path: Path) -> Path:
        return path

    def last(self, name: str, path: str) -> int:
        return max(index for index, event in enumerate(self.events) if event == (name, path))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("overwrite", [False, True])
def test_everything_is_on_disk_before_the_rename_and_the_rename_after_it(
    monkeypatch: pytest.MonkeyPatch, target: Path, overwrite: bool
) -> None:
    if overwrite:
        target.mkdir()
        (target / "old").write_text("old")
    output, _ = begin(target, overwrite=overwrite)
    recorder = Recorder(monkeypatch, target.parent)
    files = {name: output.file(name, 4) for name in ("a", "b/c", "b/d/e")}
    for file in files.values():
        file.write(0, b"1234")
    output.commit()
    data = ".out.megaconv-partial/data"
    appeared = recorder.last("exchange" if overwrite else "rename", data)
    for name in files:
        assert (
            recorder.last("pwrite", f"{data}/{name}")
            < recorder.last("fsync", f"{data}/{name}")
            < appeared
        )
    for directory in (data, f"{data}/b", f"{data}/b/d"):
        assert recorder.last("fsync", directory) < appeared
    assert recorder.last("fsync", ".") > appeared
    assert sorted(path.name for path in target.iterdir()) == ["a", "b"]


def test_tensors_are_on_disk_before_the_journal_vouches_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[tuple[str, set[str]]] = []
    sync, record = StagedFile.sync, Staging.record

    def note_sync(self: StagedFile) -> None:
        events.append(("sync", {"/".join(self.path.parts[-2:])}))
        sync(self)

    def note_record(self: Staging, entries: list[dict[str, Any]]) -> None:
        events.append(
            (
                "record",
                {
                    "/".join(file.split("/")[-2:])
                    for entry in entries
                    for file, _, _ in entry.get("runs", [])
                },
            )
        )
        record(self, entries)

    monkeypatch.setattr(StagedFile, "sync", note_sync)
    monkeypatch.setattr(Staging, "record", note_record)
    monkeypatch.setattr(transfer, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(transfer.Transfer, "_write_headers", lambda self: self._record())
    convert(
        write_llama(tmp_path / "model"),
        tmp_path / "out",
        "core",
        ConvertOptions(save=SaveOptions(tp=2, pp=2)),
    )
    synced: set[str] = set()
    vouched: set[str] = set()
    for kind, files in events:
        if kind == "sync":
            synced |= files
        else:
            assert files <= synced
            vouched |= files
            synced = set()
    assert len(vouched) == 4


# Journals.


def leave(target: Path, *entries: dict[str, Any], plan: str = "a") -> None:
    """Leave the files of an interrupted run."""
    output, _ = begin(target, plan=plan)
    output.file("file", 4).write(0, b"1234")
    output.record([*entries])
    output.keep()


def test_a_resumed_run_finds_its_entries_and_its_bytes(target: Path) -> None:
    leave(target, {"n": 1}, {"n": 2})
    output, entries = begin(target, resume=True)
    assert entries == [{"n": 1}, {"n": 2}]
    output.file("file", 4, keep=True)
    output.commit()
    assert (target / "file").read_bytes() == b"1234"


def test_a_run_that_resumes_twice_finds_the_entries_of_both(target: Path) -> None:
    leave(target, {"n": 1})
    output, _ = begin(target, resume=True)
    output.record([{"n": 2}])
    output.keep()
    assert begin(target, resume=True)[1] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_another_plan_are_removed(target: Path, resume: bool) -> None:
    leave(target, {"n": 1}, plan="another")
    output, entries = begin(target, resume=resume)
    assert entries == []
    assert list((partial(target) / "data").iterdir()) == []
    output.discard()


def test_a_run_that_cannot_go_on_says_why(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(target, {"n": 1}, plan="another")
    begin(target, resume=True)[0].discard()
    assert caplog.messages == [
        f"{target}: starts again and discards the work of the interrupted run: plan is a, was another"
    ]


@pytest.mark.parametrize(
    ("damage", "reason"), [("file", "its files are not"), ("journal", "its journal can't be read")]
)
def test_a_run_reports_damage(
    target: Path, caplog: pytest.LogCaptureFixture, damage: str, reason: str
) -> None:
    leave(target, {"n": 1})
    damaged = partial(target) / ("data/file" if damage == "file" else "journal.jsonl")
    damaged.write_bytes(b"12")
    assert Staging(target).open({"plan": "a"}, resume=True, sizes={"file": 4}) == []
    (message,) = caplog.messages
    assert reason in message


def test_a_run_that_has_nothing_to_lose_says_nothing(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(target, plan="another")
    begin(target, resume=True)[0].discard()
    leave(target, {"n": 1}, plan="another")
    begin(target, resume=False)[0].discard()
    assert caplog.messages == []


def test_without_resume_what_the_same_plan_left_is_removed_too(target: Path) -> None:
    leave(target, {"n": 1})
    output, entries = begin(target)
    assert entries == []
    assert list((partial(target) / "data").iterdir()) == []
    output.discard()


@pytest.mark.parametrize("torn", [b'{"n": ', b'{"n": 3', b"\0" * 40, b"\xff\xfe"])
def test_the_line_that_was_being_written_does_not_count(target: Path, torn: bytes) -> None:
    leave(target, {"n": 1}, {"n": 2})
    with (partial(target) / "journal.jsonl").open("ab") as journal:
        journal.write(torn)
    output, entries = begin(target, resume=True)
    assert entries == [{"n": 1}, {"n": 2}]
    output.record([{"n": 4}])
    output.keep()
    assert begin(target, resume=True)[1] == [{"n": 1}, {"n": 2}, {"n": 4}]


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\0\0\0\n", b"garbage\n", b"{}\n", b"7\n", b"null\n", b"[]\n", b'{"plan": 7}\n'],
)
def test_a_journal_of_garbage_is_as_good_as_none(target: Path, content: bytes) -> None:
    leave(target, {"n": 1})
    (partial(target) / "journal.jsonl").write_bytes(content)
    output, entries = begin(target, resume=True)
    assert entries == []
    assert list((partial(target) / "data").iterdir()) == []
    output.keep()
    assert Journal(partial(target) / "journal.jsonl").read() == [{"plan": {"plan": "a"}}]


def damage_nothing(file: Path) -> None:
    pass


def lose(file: Path) -> None:
    file.unlink()


def shorten(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(100)


@pytest.mark.parametrize("damage", [damage_nothing, lose, shorten])
def test_a_resumed_conversion_is_right_even_where_a_file_was_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path, damage: Callable[[Path], None]
) -> None:
    """A crash of the machine may take a file, or its size, though the journal is there."""
    model, options = write_llama(tmp_path / "model"), ConvertOptions(resume=True)
    convert(model, tmp_path / "undisturbed" / "out", "core", ConvertOptions())

    def interrupt(self: transfer.Transfer) -> None:
        self._record()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer.Transfer, "_write_headers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(model, target, "core", options)
    (file,) = partial(target).rglob("*.pt")
    damage(file)
    convert(model, target, "core", options)
    assert snapshot(target) == snapshot(tmp_path / "undisturbed" / "out")


# Targets and locks.


def test_a_second_writer_is_refused_until_the_first_one_is_done(target: Path) -> None:
    first, _ = begin(target)
    file = first.file("file", 4)
    second = Staging(target)
    with pytest.raises(TargetExists, match="another run"):
        second.open({"plan": "a"}, resume=False)
    second.discard()  # a conversion does this on every error
    file.write(0, b"1234")
    first.commit()
    assert (target / "file").read_bytes() == b"1234"


@pytest.mark.parametrize("end", [Staging.discard, Staging.keep])
def test_after_the_end_of_the_first_writer_a_second_one_may_begin(
    target: Path, end: Callable[[Staging], None]
) -> None:
    first, _ = begin(target)
    end(first)
    second, _ = begin(target)
    second.commit()
    assert target.is_dir()


@pytest.mark.parametrize("starts", ["before", "meanwhile"])
def test_the_directory_to_which_a_training_run_saves_is_not_replaced(
    target: Path, starts: str
) -> None:
    """It was, and the run failed at its next save, with all of its checkpoints lost."""
    target.mkdir()
    (target / "old").touch()
    run = RunLock(target, OF_A_RUN)
    busy = pytest.raises(TargetExists, match="a training run saves there just now; wait until")
    if starts == "before":
        run.take()
        with busy as refused:
            begin(target, overwrite=True)
    else:
        opened, _ = begin(target, overwrite=True)
        run.take()
        with busy as refused:
            opened.commit()
        opened.discard()
    assert refused.value.code == "target-busy"
    assert sorted(snapshot(target)) == [OF_A_RUN, "old"]
    run.release()  # as a killed run leaves its lock file
    opened, _ = begin(target, overwrite=True)
    opened.commit()
    assert not snapshot(target)


def test_an_occupied_target_is_refused_at_once(target: Path) -> None:
    target.mkdir()
    (target / "x").touch()
    with pytest.raises(TargetExists, match="already exists"):
        Staging(target)
    assert not partial(target).exists()


def test_a_target_that_became_occupied_meanwhile_is_refused_and_kept(target: Path) -> None:
    output, _ = begin(target)
    output.file("file", 1)
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(TargetExists, match="already exists"):
        output.commit()
    assert [path.name for path in target.iterdir()] == ["precious"]


@pytest.mark.parametrize("in_one_step", [False, True])
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_an_old_output_is_replaced_with_or_without_an_exchange_in_one_step(
    monkeypatch: pytest.MonkeyPatch, target: Path, kind: str, in_one_step: bool
) -> None:
    if not in_one_step:
        monkeypatch.setattr(renames, "_renameat2", None)
    if kind == "directory":
        (target / "old").mkdir(parents=True)
    else:
        target.write_text("old")
    output, _ = begin(target, overwrite=True)
    output.file("new", 1)
    output.commit()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_linux_swaps_names_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in {name}").touch()
    if not renames.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system can't")
    assert (tmp_path / "a" / "in b").exists()
    assert (tmp_path / "b" / "in a").exists()
    with pytest.raises(FileNotFoundError):
        renames.exchange(tmp_path / "a", tmp_path / "missing")


def test_a_target_behind_a_symlink_is_written_where_it_points(tmp_path: Path, target: Path) -> None:
    (tmp_path / "real" / "out").mkdir(parents=True)
    target.symlink_to(tmp_path / "real" / "out")
    output, _ = begin(target)
    output.file("file", 1)
    assert partial(tmp_path / "real" / "out").is_dir()
    output.commit()
    assert target.is_symlink()
    assert (tmp_path / "real" / "out" / "file").exists()


def test_too_little_space_is_reported_with_both_numbers(target: Path) -> None:
    Staging(target).require_space(1)
    with pytest.raises(
        NotEnoughSpace, match=r"1,000,000,000,000,000,000 bytes are needed, .* has [\d,]+ free"
    ):
        Staging(target / "not" / "there").require_space(10**18)


def test_a_journal_whose_first_line_occurs_again_is_not_believed(target: Path) -> None:
    output, _ = begin(target)
    output.record([{"tensor": 1}])
    output.keep()
    journal = partial(target) / "journal.jsonl"
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + first + b"".join(rest))
    _, entries = begin(target, resume=True)
    assert entries == []
