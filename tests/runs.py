"""The command line run by tests, and what has to hold after every run that fails."""

import fcntl
import gc
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from errno import EACCES
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

from megaconv.commands.cli import main

MAIN = "\nfrom megaconv.commands.cli import main; main()"


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


def run(*arguments: object) -> Outcome:
    """`megaconv ARGUMENTS` in this process. An exception that would end in a traceback comes through."""
    out, err, status = StringIO(), StringIO(), 0
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in taken}
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["megaconv", *map(str, arguments)]),
        patch.object(gc, "freeze"),  # a command freezes its garbage, as its process ends
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Outcome(status, out.getvalue(), err.getvalue())


@contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    """A block in which a directory can't be listed. Permissions don't stop root, who may run the tests."""
    listed = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == directory:
            raise PermissionError(EACCES, os.strerror(EACCES), str(path))
        return listed(path)

    with patch.object(os, "scandir", scandir):
        yield


def start(*arguments: object, before: str = "") -> subprocess.Popen[str]:
    """The same in a process of its own, after it has run the code `before`."""
    command = [sys.executable, "-c", before + MAIN, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


class Started(Protocol):
    """A Popen, or a fork of tests/forks.py."""

    @property
    def returncode(self) -> Any: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def kill(self) -> None: ...


def finish(process: Started, seconds: float = 30) -> Outcome:
    """Kills the process when it takes longer, and raises TimeoutExpired."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Outcome(process.returncode, out, err)


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """All that a command writes when it talks to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    root = str(Path(__file__).parents[1])
    with subprocess.Popen(
        command,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "PYTHONPATH": root} | environment,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                block = os.read(ours, 1 << 16)
            except OSError:  # Linux reports the end of a terminal as an error
                break
            if not block:
                break
            shown += block
        assert process.wait(30) == 0
    os.close(ours)
    return shown.decode()


def assert_refused(outcome: Outcome, status: int, *words: str) -> None:
    """The exit status, one line on stderr that holds all the words, nothing on stdout."""
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("megaconv: error: "), outcome.err
    assert (outcome.status, outcome.out) == (status, ""), outcome
    for word in words:
        assert word in outcome.err


def write_old_output(target: Path) -> Path:
    """Write a target that --overwrite may replace: an old output of ours, with a file that identifies it."""
    target.mkdir(parents=True)
    (target / "megaconv.json").write_text("{}")
    (target / "precious.txt").write_text("precious")
    return target


def snapshot(directory: Path) -> dict[str, str]:
    """Everything below a directory: a hash of each file's content, "directory" for directories."""
    return {
        str(path.relative_to(directory)): sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(directory.rglob("*"))
    }


@contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    """Check that the block leaves the directory unchanged: its sources, its targets, and no remains of a run."""
    before = snapshot(directory)
    yield
    assert snapshot(directory) == before
