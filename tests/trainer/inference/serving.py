"""A server in a process of its own, and plain requests to it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.inference.opening import Opened, open_model
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel
from tests.trainer.forks import FORKS

KEY = "a key"


class Fork:
    """A command of the trainer in a process of its own, without the seconds that a start of Python and torch takes."""

    def __init__(self, words: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        self._process = FORKS.Process(target=_run, args=(words, self._out, self._err))
        self._process.start()

    def line(self) -> str:
        """The first line of its output; what there is of it if the process ends before."""
        while not (text := _text(self._out)).endswith("\n") and self._process.is_alive():
            time.sleep(0.02)
        return text.partition("\n")[0]

    def end(self) -> tuple[int, str]:
        """Status and errors after SIGTERM."""
        self._process.terminate()
        self._process.join(60)
        self._process.kill()
        status, errors = self._process.exitcode, _text(self._err)
        self._folder.cleanup()
        return status, errors


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _run(words: list[str], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    from megatron_lite.cli import main

    main(words)


class Serving:
    """A server started by a user, or by torchrun for several ranks."""

    def __init__(self, directory: Path, *flags: str, world: int = 1) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "OMP_NUM_THREADS": "1",
        }
        starts = (
            ["-m", "torch.distributed.run", "--nproc-per-node", str(world)] if world > 1 else []
        )
        self.process = subprocess.Popen(
            [sys.executable, *starts, "-m", "megatron_lite", *_command(directory, flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "serving" in line, self.process.communicate()
        self.url = _address(line)

    def ask(
        self, route: str, body: Any = None, *, method: str | None = None, key: str = KEY
    ) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + route, data, {"Authorization": f"Bearer {key}"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, parsed(error.read())

    def end(self) -> tuple[int, str]:
        """Status and errors after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, errors

    def metric(self, name: str) -> float:
        _, text = self.ask("/metrics")
        return float(
            next(
                line.split()[-1]
                for line in text.splitlines()
                if line.startswith(f"megatron_lite_{name} ")
            )
        )

    def settle(self) -> None:
        """Waits until nothing runs or waits."""
        end = time.monotonic() + 60
        while self.metric("requests_running") + self.metric("requests_waiting"):
            assert time.monotonic() < end, "a request that nobody waits for keeps its slot"
            time.sleep(0.2)


class ForkedServing(Serving):
    """The same server in a fork (tests/trainer/forks.py), for tests that are not about its start."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._fork = Fork(_command(directory, flags))
        line = self._fork.line()
        assert "serving" in line, self._fork.end()
        self.url = _address(line)

    def end(self) -> tuple[int, str]:
        return self._fork.end()


def _command(directory: Path, flags: Sequence[str]) -> list[str]:
    return ["serve", "--load", str(directory), "--port", "0", "--api-key", KEY, *flags]


def _address(line: str) -> str:
    """The address in the line with which a server reports its start."""
    return line.split()[3].rstrip(",")


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def ranks(torchrun: int) -> dict[int, int]:
    """Processes by rank."""
    found = {}
    for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        found |= {
            int(word.removeprefix("RANK=")): int(pid) for word in words if word.startswith("RANK=")
        }
    return found


def opened(directory: Path) -> Opened:
    """The same model in this process, alone."""
    flags = Namespace(
        load=str(directory), dtype="fp32", slots=3, max_length=None, tokenizer_type=None, tokenizer_model=None, vocab_file=None,
        merge_file=None, tp=1, pp=1, ep=1, distributed_backend="gloo", distributed_timeout_minutes=1.0,
        training=None, adapter=[], stream_weights=False, quantize=None, draft_tokens=0,
    )  # fmt: skip
    return open_model(flags, Parallel(), launch.start(Parallel()))
