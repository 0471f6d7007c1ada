"""Runs `megaconv` by the ten thousand: everything is imported once, and each case is a fork of this process.

A case is the real command line in a process of its own: its own file descriptors, signals, limits and exit status; what
it doesn't pay is Python's start. What it prints goes to files in memory. Torch is not imported here, so that the memory
of a case is that of a conversion.
"""

import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from megaconv import registry
from megaconv.commands import cli, comparison, inspection, progress, verification  # noqa: F401  (imported before the forks)
from megaconv.engine import conversion, transfer  # noqa: F401
from megaconv.families import families

SECONDS = 30.0
"""After which a case that has not ended is one that hangs; on a quiet machine they take hundredths of one."""

_MEMORY = 2 << 30
"""Bytes of data for a case, so that a case that takes everything doesn't harm the machine. An import of torch with CUDA
takes much more address space than that, and little of it is data."""

_FORBIDDEN = frozenset((
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen",
    "pickle.find_class", "socket.connect", "socket.bind", "urllib.Request", "webbrowser.open",
))  # fmt: skip
"""Audit events that no command has a reason for."""

_largest_peak = 0

_watching: Any = None
"""(descriptor to report to, directory that nothing may be opened in), in a case that is watched."""


@dataclass(frozen=True)
class Outcome:
    """The end of a case."""

    status: int
    """Negative: the signal that ended it."""
    out: str
    err: str
    seconds: float
    peak_bytes: int
    hung: bool = False
    events: tuple[str, ...] = ()
    """Actions of the command that no checkpoint may cause."""


@dataclass(frozen=True)
class Blow:
    """A signal after so many seconds."""

    seconds: float
    number: int = signal.SIGKILL


def warm_up() -> None:
    """Import everything that a case would import, and build the command line once."""
    registry.all_loaders()
    registry.all_savers()
    families()
    cli.load()
    cli.app = get_command(cli.app)  # type: ignore[assignment]
    sys.addaudithook(_audit)
    gc.collect()
    gc.freeze()


def run(
    *arguments: object,
    folder: Path,
    prepare: Callable[[], object] | None = None,
    blow: Blow | None = None,
    outside: Path | None = None,
    seconds: float = SECONDS,
) -> Outcome:
    """`megaconv ARGUMENTS` in a fork of this process, with `folder` as its working directory.

    prepare: called in the fork before the command.
    outside: a directory in which the case must not open anything.
    """
    files = [os.memfd_create(name) for name in ("out", "err", "events")]
    started = time.monotonic()
    process = os.fork()
    if not process:
        _become([str(argument) for argument in arguments], folder, files, prepare, outside)
    try:
        hung = _wait(process, blow, seconds)
        _, status, used = os.wait4(process, 0)
        out, err, events = (_content(file) for file in files)
    finally:
        for file in files:
            os.close(file)
    global _largest_peak
    _largest_peak = max(_largest_peak, used.ru_maxrss << 10)
    took = time.monotonic() - started
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, out, err, took, used.ru_maxrss << 10, hung, tuple(events.splitlines()))


def largest_peak() -> int:
    """Bytes of the largest process that this one has run."""
    return _largest_peak


def _wait(process: int, blow: Blow | None, seconds: float) -> bool:
    """Until it has ended. Whether it had to be killed because it didn't."""
    watch = os.pidfd_open(process)
    try:
        if blow is not None and not select.select([watch], [], [], blow.seconds)[0]:
            os.kill(process, blow.number)
        hung = not select.select([watch], [], [], seconds)[0]
        if hung:
            os.kill(process, signal.SIGKILL)
        return hung
    finally:
        os.close(watch)


def _content(file: int) -> str:
    return os.pread(file, 1 << 20, 0).decode(errors="replace")


def _become(
    arguments: list[str],
    folder: Path,
    files: list[int],
    prepare: Callable[[], object] | None,
    outside: Path | None,
) -> None:
    global _watching
    status = 1
    try:
        # Until the command handles its signals, they kill it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(folder)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        sys.argv = ["megaconv", *arguments]
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if prepare is not None:
            prepare()
        _watching = (files[2], None if outside is None else str(outside))
        status = call_main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def call_main() -> int:
    """The command line's exit status. An exception that would end in a traceback comes through."""
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None:
        return
    file, outside = _watching
    if event in _FORBIDDEN:
        os.write(file, f"{event} {arguments!r:.200}\n".encode())
    elif event == "open" and outside is not None and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(outside + os.sep):
            os.write(file, f"open {path}\n".encode())
