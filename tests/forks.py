"""`megaconv` in processes of their own that don't pay for Python's start: forks of one that has imported all of it.

    process = start("convert", source, target, before="import os; ...")

A fork has its own arguments, environment, directory, streams and signals, and ends as a script does. huggingface_hub, torch
and transformers are not imported before: they read the environment when they are. Tests of what a start of Python does or
imports take `start` of tests/runs.py.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from tests import unsynced
from tests.runs import MAIN

ROOT = Path(__file__).parents[1]
_LONGEST = 1 << 20
_NUMBER = struct.Struct("=i")


def start(*arguments: object, before: str = "") -> "Fork":
    """`megaconv ARGUMENTS` after the code `before`."""
    return Fork(["-c", *map(str, arguments)], before + MAIN)


class Fork:
    """The part of Popen that tests use. Not a child of this process: a keeper tells its number and its exit status."""

    def __init__(self, argv: list[str], code: str) -> None:
        self.args, self.returncode = argv, cast(int | None, None)
        wanted = {
            "argv": argv,
            "code": code,
            "cwd": str(Path.cwd()),
            "environment": dict(os.environ),
        }
        pipes = [os.pipe() for _ in range(3)]
        theirs = [end for _, end in pipes]
        socket.send_fds(_server(), [json.dumps(wanted).encode()], theirs)
        for end in theirs:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end) for end, _ in pipes[:2])
        self._news = pipes[2][0]
        self.pid = self._number()
        self._readers: dict[str, threading.Thread] = {}
        self._read: dict[str, str] = {}

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both streams. May be called again after a TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        streams = {"out": self.stdout, "err": self.stderr}
        if not self._readers:
            for name, stream in streams.items():
                self._readers[name] = threading.Thread(target=self._read_all, args=(name, stream))
                self._readers[name].start()
        for reader in self._readers.values():
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._read["out"], self._read["err"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _read_all(self, name: str, stream: IO[str]) -> None:
        with stream:
            self._read[name] = stream.read()

    def _ended(self, seconds: float | None) -> int | None:
        """The exit status; None if the process still runs after so many seconds."""
        if self.returncode is None and self._has_news(seconds):
            self.returncode = self._number()
            os.close(self._news)
        return self.returncode

    def _has_news(self, seconds: float | None) -> bool:
        # select() takes no descriptor above 1023. A long test run has more open.
        waiting = select.poll()
        waiting.register(self._news, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else seconds * 1000))

    def _number(self) -> int:
        found = os.read(self._news, _NUMBER.size)
        assert len(found) == _NUMBER.size, "the keeper of a process ended"
        number: int = _NUMBER.unpack(found)[0]
        return number


@functools.cache
def _server() -> socket.socket:
    """Our end; the server ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    command = [sys.executable, "-m", "tests.forks", str(theirs.fileno())]
    single = {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads is not forked safely
    environment = os.environ | single | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)  # called first
    return ours


# The server's side.


def warm_up() -> None:
    unsynced.install()
    from megaconv import registry
    from megaconv.commands import cli, comparison, inspection, progress, verification  # noqa: F401
    from megaconv.engine import conversion, transfer  # noqa: F401
    from megaconv.families import families

    registry.all_loaders()
    registry.all_savers()
    families()
    for name in (
        "httpx",
        "httpx2",
        "tqdm.auto",
        "filelock",
        "yaml",
    ):
        # Dependencies of huggingface_hub.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    late = {"huggingface_hub", "torch", "transformers"} & set(sys.modules)
    assert not late, f"{late} would see the environment of another test"
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> str | None:
    """The code to run, in a fork; None in the server when nobody asks any more."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _LONGEST, 3)
        if not message:
            return None
        output, error, news = descriptors
        if os.fork():
            for end in descriptors:
                os.close(end)
            _reap()
            continue
        requests.close()
        _keep(news)
        return _become(json.loads(message), output, error)


def _reap() -> None:
    """Take note of keepers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(news: int) -> None:
    """Returns in the process that is asked for. Its keeper tells its number, and how it ended."""
    number = os.fork()
    if not number:
        return
    os.closerange(3, news)
    os.closerange(news + 1, os.sysconf("SC_OPEN_MAX"))
    os.write(news, _NUMBER.pack(number))
    _, status = os.waitpid(number, 0)
    os.write(news, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(wanted: dict[str, Any], output: int, error: int) -> str:
    """A process as Python's start makes it."""
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.__stdout__ = open(1, "w")  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", buffering=1)  # type: ignore[misc]  # noqa: SIM115
    sys.argv = wanted["argv"]
    return str(wanted["code"])


if __name__ == "__main__":
    warm_up()
    _code = serve(socket.socket(fileno=int(sys.argv[1])))
    if _code is not None:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(_code, "<string>", "exec"), vars(sys.modules["__main__"]))
