"""Conversions by several processes: the same files as by one, and whatever ends one rank ends all, reported once."""

import errno
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed  # so that the forked ranks have it

from formats.staged_file import StagedFile
from formats.staging import Staging
from formats.tensor import Box, Bytes, FileTensor
from megaconv.commands.cli import main
from megaconv.engine import store_watch, transfer
from megaconv.engine.ranks import ALONE, Joined, started_ranks
from tests.forks import start
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish, run, snapshot, unchanged

Fault = Callable[[], object]
DISTRIBUTED = Path(__file__).parents[1] / "fixtures" / "core-llama-distopt-tp1pp2dp2" / "checkpoint"
SECONDS = 30.0
"""After which a rank that has not ended is one that hangs; on a quiet machine they end within two."""


class Fleet:
    """Ranks as torchrun would start them, forked from this process, which has imported torch already."""

    def __init__(
        self,
        folder: Path,
        size: int,
        arguments: list[object],
        faults: Mapping[int, Fault],
        *,
        launcher: bool = False,
    ) -> None:
        """launcher: whether a process of its own keeps the store, as torchrun does, or rank 0, as under srun."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._folder = folder
        self.ranks = []
        self.launcher = os.fork() if launcher else None
        if self.launcher == 0:
            _keep_store(port)
        for rank in range(size):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": launcher}
            process = os.fork()
            if not process:
                self._become(rank, environment, arguments, faults.get(rank, lambda: None))
            self.ranks.append(process)

    def _become(
        self, rank: int, environment: dict[str, object], arguments: list[object], fault: Fault
    ) -> None:
        status = 1
        try:
            os.environ.update({name: str(value) for name, value in environment.items()})
            for number, name in ((1, "out"), (2, "err")):
                file = (self._folder / f"{name}-{rank}").open("w", buffering=1)
                os.dup2(file.fileno(), number)
                setattr(sys, f"std{name}", file)
            sys.argv = ["megaconv", *map(str, arguments)]
            fault()
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else bool(end.code)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def outcomes(self) -> list[Outcome]:
        """The outcomes of all ranks. Each rank must end in time."""
        statuses: dict[int, int] = {}
        until = time.monotonic() + SECONDS
        while len(statuses) < len(self.ranks) and time.monotonic() < until:
            for process in set(self.ranks) - set(statuses):
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    statuses[process] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        if self.launcher:
            self.kill_launcher()
        hanging = [rank for rank, process in enumerate(self.ranks) if process not in statuses]
        self.kill(hanging)
        assert not hanging, f"ranks {hanging} hang"
        return [
            Outcome(
                statuses[process],
                *((self._folder / f"{name}-{rank}").read_text() for name in ("out", "err")),
            )
            for rank, process in enumerate(self.ranks)
        ]

    def kill_launcher(self) -> None:
        assert self.launcher
        os.kill(self.launcher, signal.SIGKILL)
        os.waitpid(self.launcher, 0)
        self.launcher = None

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank], signal.SIGKILL)
            os.waitpid(self.ranks[rank], 0)


def _keep_store(port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store:
        time.sleep(60)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the output of ranks and for markers. The models are elsewhere."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", shards=2)


def arguments(model: Path, saver: str = "core", *options: object) -> list[object]:
    return [
        "convert",
        "--load-dir",
        model,
        "--saver",
        saver,
        "--save-dir",
        model.parent / "out",
        *options,
    ]


def command(model: Path, *options: object) -> list[object]:
    return arguments(model, "core", "--tp", 2, "--pp", 2, *options)


def complete_outcome(command: list[object]) -> dict[str, str]:
    """The result of the same command in one process."""
    place = Path(str(command[6]))
    assert run(*command).status == 0
    made = snapshot(place)
    place.rename(place.with_name("by-one"))
    return made


def assert_reported_once(outcomes: list[Outcome], *words: str, reporter: int | None = None) -> None:
    """Every rank failed, one of them said why in one line, none printed a stack trace or a result."""
    assert all(outcome.status for outcome in outcomes), outcomes
    assert not any(outcome.out or "Traceback" in outcome.err for outcome in outcomes), outcomes
    lines = [
        (rank, line) for rank, outcome in enumerate(outcomes) for line in outcome.err.splitlines()
    ]
    reported = [(rank, line) for rank, line in lines if line.startswith("megaconv: ")]
    assert len(reported) == 1, reported
    assert reporter in (None, reported[0][0])
    for word in words:
        assert word in reported[0][1]


def slow(seconds: float = 0.2, marker: Path | None = None) -> Fault:
    """Reading takes its time."""

    def begin() -> None:
        read_into = FileTensor.read_into

        def slowly(self: FileTensor, box: Box, out: Bytes) -> None:
            if marker is not None:
                marker.touch()
            time.sleep(seconds)
            read_into(self, box, out)

        FileTensor.read_into = slowly  # type: ignore[method-assign]

    return begin


@contextmanager
def under_way(
    folder: Path, command: list[object], size: int = 3, *, launcher: bool = False
) -> Iterator[Fleet]:
    """Slow ranks, all of which have begun to read."""
    markers = [folder / f"reading-{rank}" for rank in range(size)]
    faults = {rank: slow(marker=marker) for rank, marker in enumerate(markers)}
    fleet = Fleet(folder, size, command, faults, launcher=launcher)
    for _ in range(2000):
        if all(marker.exists() for marker in markers):
            break
        time.sleep(0.01)
    yield fleet


# The same as by one process.


@pytest.mark.parametrize("case", ["hf to core", "core to hf", "core to core"])
def test_four_ranks_write_what_one_process_writes(model: Path, folder: Path, case: str) -> None:
    source, options = model, ["core", "--tp", 2, "--pp", 2, "--verify"]
    if case != "hf to core":
        assert run(*arguments(model, "core", "--tp", 2, "--pp", 2)).status == 0
        source = (model.parent / "out").rename(model.parent / "tp2pp2")
        options = (
            ["hf", "--max-shard-size", "30KB"]
            if case == "core to hf"
            else ["core", "--tp", 4, "--pp", 1]
        )
    expected = complete_outcome(arguments(source, *map(str, options)))
    outcomes = Fleet(folder, 4, arguments(source, *map(str, options)), {}).outcomes()
    assert [outcome.status for outcome in outcomes] == [0] * 4, outcomes
    assert snapshot(model.parent / "out") == expected
    assert "fingerprint" in outcomes[0].out
    assert not any(outcome.out for outcome in outcomes[1:])
    assert not any(outcome.err for outcome in outcomes)
    assert not (model.parent / ".out.megaconv-partial").exists()


def test_ranks_with_stages_of_their_own_read_next_to_nothing_twice(
    model: Path, folder: Path
) -> None:
    def count(rank: int) -> Fault:
        def begin() -> None:
            read_into = FileTensor.read_into

            def counted(self: FileTensor, box: Box, out: Bytes) -> None:
                with (folder / f"bytes-{rank}").open("a") as file:
                    file.write(f"{out.size}\n")
                read_into(self, box, out)

            FileTensor.read_into = counted  # type: ignore[method-assign]

        return begin

    outcomes = Fleet(
        folder, 2, command(model, "--workers", 1), {0: count(0), 1: count(1)}
    ).outcomes()
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    read = [sum(map(int, (folder / f"bytes-{rank}").read_text().split())) for rank in range(2)]
    # Small tensors may be hashed by a rank that doesn't write them, so they are read twice.
    assert 42_464 * 2 <= sum(read) < 42_464 * 2 * 1.01
    assert min(read) > 0.4 * sum(read)


def test_a_dry_run_is_printed_once(model: Path, folder: Path) -> None:
    with unchanged(model.parent):
        outcomes = Fleet(folder, 2, command(model, "--dry-run"), {}).outcomes()
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert [bool(outcome.out) for outcome in outcomes] == [True, False]


# Whatever ends one ends all.


def test_a_broken_source_is_reported_once(model: Path, folder: Path) -> None:
    (model / "config.json").write_text("{")
    with unchanged(model.parent):
        assert_reported_once(Fleet(folder, 3, command(model), {}).outcomes(), "config.json")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_learns_of_the_end_while_it_starts_reports_nothing(
    rank: int, model: Path, folder: Path
) -> None:
    """The others fail while this rank still starts its watch, which interrupts it."""
    (model / "config.json").write_text("{")

    def start_slowly() -> None:
        start = threading.Thread.start

        def slow(thread: threading.Thread) -> None:
            start(thread)
            if thread.name == "watch":
                time.sleep(5)

        threading.Thread.start = slow  # type: ignore[method-assign]

    fleet = Fleet(folder, 3, command(model), {rank: start_slowly})
    assert_reported_once(fleet.outcomes(), "config.json")


@pytest.mark.parametrize("record", ["data/0", "data/1", "data/2"])
def test_damage_in_what_ranks_read_parts_of_is_found(
    record: str, tmp_path: Path, folder: Path
) -> None:
    """The damage is in the flat buffers of a distributed optimizer, of which each rank needs other parameters."""
    shutil.copytree(DISTRIBUTED, tmp_path / "source")
    file = tmp_path / "source" / "iter_0000002" / "mp_rank_00_000" / "distrib_optim.pt"
    with zipfile.ZipFile(file) as archive:
        found = next(entry for entry in archive.infolist() if entry.filename.endswith(f"/{record}"))
    with file.open("r+b") as opened:
        opened.seek(found.header_offset + 26)
        name, extra = struct.unpack("<HH", opened.read(4))
        opened.seek(found.header_offset + 30 + name + extra + found.file_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    words = [
        "convert",
        "--load-dir",
        tmp_path / "source",
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--tp",
        2,
    ]
    with unchanged(tmp_path):
        assert_reported_once(Fleet(folder, 3, words, {}).outcomes(), "distrib_optim.pt", "checksum")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_disk_is_full_ends_all_with_that_cause(
    model: Path, folder: Path, rank: int
) -> None:
    def fill() -> None:
        def full(descriptor: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.pwrite = full

    with unchanged(model.parent):
        faults = {other: slow() for other in range(3)} | {rank: fill}
        outcomes = Fleet(folder, 3, command(model), faults).outcomes()
    assert_reported_once(outcomes, "disk is full", reporter=rank)
    assert outcomes[rank].status == 5


def test_a_rank_that_fails_last_leaves_nothing_finished(model: Path, folder: Path) -> None:
    def broken(self: StagedFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail() -> None:
        StagedFile.sync = broken  # type: ignore[method-assign]

    with unchanged(model.parent):
        assert_reported_once(
            Fleet(folder, 2, command(model), {1: fail}).outcomes(),
            os.strerror(errno.EIO),
            reporter=1,
        )


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_the_others(model: Path, folder: Path, rank: int) -> None:
    with unchanged(model.parent), under_way(folder, command(model)) as fleet:
        started = time.monotonic()
        os.kill(fleet.ranks[rank], signal.SIGKILL)
        outcomes = fleet.outcomes()
        assert time.monotonic() - started < 10
    assert outcomes[rank].status == -signal.SIGKILL
    assert_reported_once(outcomes, f"rank {rank} ended without reporting an error")


def test_ranks_whose_launcher_is_killed_end_with_one_line(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "SILENT_SECONDS", 1.0)
    with unchanged(model.parent), under_way(folder, command(model), launcher=True) as fleet:
        started = time.monotonic()
        fleet.kill_launcher()
        outcomes = fleet.outcomes()
        assert 1 < time.monotonic() - started < 10
    assert_reported_once(
        outcomes,
        "the store of the rendezvous",
        "was the process that started the ranks killed?",
        reporter=0,
    )


def test_a_launcher_that_is_killed_before_its_ranks_have_met_ends_them_with_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = "from megaconv.engine import store_watch\nstore_watch.SILENT_SECONDS = 0.6"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
    }.items():
        monkeypatch.setenv(name, value)
    begun = time.monotonic()
    outcome = finish(start(*command(model), before=impatient), 60)
    assert_refused(outcome, 1, f"the store of the rendezvous at 127.0.0.1:{port}")
    assert time.monotonic() - begun < 20


def test_with_resume_they_keep_what_they_have_done(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "SILENT_SECONDS", 1.0)
    with under_way(folder, command(model, "--resume"), launcher=True) as fleet:
        fleet.kill_launcher()
        assert_reported_once(fleet.outcomes(), "the store of the rendezvous")
    assert (model.parent / ".out.megaconv-partial" / "journal-2.jsonl").is_file()
    outcomes = Fleet(folder, 3, command(model, "--resume"), {}, launcher=True).outcomes()
    assert [outcome.status for outcome in outcomes] == [0] * 3, outcomes
    assert run("diff", model, model.parent / "out").status == 0


def test_a_rank_that_is_killed_with_the_launcher_ends_the_others(model: Path, folder: Path) -> None:
    with unchanged(model.parent), under_way(folder, command(model), launcher=True) as fleet:
        fleet.kill_launcher()
        os.kill(fleet.ranks[0], signal.SIGKILL)
        outcomes = fleet.outcomes()
    assert_reported_once(outcomes, "rank 0 ended without reporting an error", reporter=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_after_the_commit_reports_the_complete_output(
    model: Path, folder: Path, number: int
) -> None:
    expected = complete_outcome(command(model))

    def end_at_the_end() -> None:
        keep = Staging.keep

        def end(self: Staging) -> None:
            keep(self)
            while not (model.parent / "out").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        Staging.keep = end  # type: ignore[method-assign]

    outcomes = Fleet(folder, 3, command(model), {1: end_at_the_end}).outcomes()
    assert "out is complete" in outcomes[0].err or number == signal.SIGTERM
    assert snapshot(model.parent / "out") == expected
    assert not (model.parent / ".out.megaconv-partial").exists()


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]])
def test_sigterm_to_one_rank_or_to_all_is_reported_once(
    model: Path, folder: Path, ranks: list[int]
) -> None:
    with unchanged(model.parent), under_way(folder, command(model)) as fleet:
        for rank in ranks:
            os.kill(fleet.ranks[rank], signal.SIGTERM)
        outcomes = fleet.outcomes()
    assert_reported_once(outcomes, "interrupted")
    assert sorted(outcome.status for outcome in outcomes) == [1, 1, 130]


@pytest.mark.parametrize("what", ["source", "options"])
def test_ranks_that_disagree_are_refused(model: Path, folder: Path, what: str) -> None:
    other = write_llama(folder / "model", shards=2)

    def differ() -> None:
        sys.argv += (
            ["--load-dir", str(other)]
            if what == "source"
            else ["--make-vocab-size-divisible-by", "4"]
        )

    with unchanged(model.parent):
        assert_reported_once(
            Fleet(folder, 2, command(model), {1: differ}).outcomes(), "rank 1", f"different {what}"
        )


# Resuming.


def test_killed_ranks_can_be_resumed(model: Path, folder: Path) -> None:
    expected = complete_outcome(command(model))

    def journal_often() -> None:
        from megaconv.engine import transfer

        transfer.JOURNAL_SECONDS = 0
        slow(0.1)()

    fleet = Fleet(
        folder,
        2,
        command(model, "--resume", "--workers", 1),
        dict.fromkeys(range(2), journal_often),
    )
    journals = [
        model.parent / ".out.megaconv-partial" / name
        for name in ("journal.jsonl", "journal-1.jsonl")
    ]
    for _ in range(2000):
        if all(journal.exists() and journal.read_text().count("\n") > 4 for journal in journals):
            break
        time.sleep(0.01)
    os.kill(fleet.ranks[1], signal.SIGKILL)
    assert_reported_once(fleet.outcomes(), "rank 1 ended")
    assert not (model.parent / "out").exists()
    done = [journal.read_text().count("\n") for journal in journals]
    assert min(done) > 4

    def count() -> None:
        read_into = FileTensor.read_into

        def counted(self: FileTensor, box: Box, out: Bytes) -> None:
            print("read", file=sys.stderr)
            read_into(self, box, out)

        FileTensor.read_into = counted  # type: ignore[method-assign]

    outcomes = Fleet(
        folder, 2, command(model, "--resume", "--workers", 1), dict.fromkeys(range(2), count)
    ).outcomes()
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert snapshot(model.parent / "out") == expected
    assert sum(outcome.err.count("read\n") for outcome in outcomes) <= 39 - (sum(done) - 2) + 2


def test_another_number_of_processes_starts_again_and_says_why(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks and two write the same two files, and other ranks compute the fingerprints of their tensors."""
    monkeypatch.setattr(transfer, "JOURNAL_SECONDS", 0)
    two_files = arguments(model, "core", "--tp", 2, "--workers", 1)
    expected = complete_outcome(two_files)
    with under_way(folder, [*two_files, "--resume"], size=3) as fleet:
        journal = model.parent / ".out.megaconv-partial" / "journal.jsonl"
        for _ in range(2000):
            if journal.exists() and journal.read_text().count("\n") > 10:
                break
            time.sleep(0.01)
        fleet.kill([2])
        fleet.ranks.pop()
        assert_reported_once(fleet.outcomes(), "rank 2 ended")
    assert journal.read_text().count("\n") > 10
    warns_on_stderr = {0: logging.getLogger().handlers.clear}  # pytest has handlers of its own
    outcomes = Fleet(folder, 2, [*two_files, "--resume"], warns_on_stderr).outcomes()
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert "interrupted run: the number of processes is 2, was 3\n" in outcomes[0].err
    assert snapshot(model.parent / "out") == expected


# Who started it.

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", **ADDRESS}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "node1"}, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", **ADDRESS}, None),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, None),
        # In a batch script, outside of srun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **ADDRESS}, None),
        ({}, None),
    ],
)
def test_ranks_are_known_by_their_environment(
    environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    ranks = started_ranks(environment)
    assert isinstance(ranks, Joined) == (expected is not None)
    assert (ranks.rank, ranks.size) == (expected or (0, 1))
    assert (ranks is ALONE) == (expected is None)


def torchrun(
    model: Path, *options: object, program: tuple[str, ...] = ("-m", "megaconv")
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = list(map(str, [*words, *program, *command(model), *options]))
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


@pytest.mark.slow
def test_torchrun_itself(model: Path) -> None:
    """torchrun keeps its store in a process of its own."""
    expected = complete_outcome(command(model))
    done = torchrun(model, "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(verified)") == 1
    assert snapshot(model.parent / "out") == expected


@pytest.mark.slow
def test_torchrun_itself_ends_with_one_report_of_an_error(model: Path) -> None:
    """It sends SIGTERM to the others, which is not the cause."""
    (model.parent / "out").mkdir()
    (model.parent / "out" / "precious.txt").write_text("precious")
    with unchanged(model.parent):
        refused = torchrun(model)
    assert refused.returncode != 0
    assert refused.stderr.count("megaconv: ") == 1, refused.stderr
    assert "already exists" in refused.stderr


FAILS_AT_FIRST = """
import os, signal, time
from formats.tensor import FileTensor
read_into = FileTensor.read_into
def killed(self, box, out):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    read_into(self, box, out)
FileTensor.read_into = killed
from megaconv.commands.cli import main
main()
"""


@pytest.mark.slow
def test_torchrun_itself_starts_ranks_anew(model: Path, folder: Path) -> None:
    expected = complete_outcome(command(model))
    (folder / "fails_at_first.py").write_text(FAILS_AT_FIRST)
    done = torchrun(model, program=("--max-restarts", "1", str(folder / "fails_at_first.py")))
    assert done.returncode == 0, done.stderr
    assert snapshot(model.parent / "out") == expected
    assert "rank 1 ended without reporting an error" in done.stderr
