"""A server in a process of its own, and plain requests to it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_lite.inference.opening import Opened, open_model
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel

KEY = "a key"


class Serving:
    def __init__(self, directory: Path, *flags: str, world: int = 1) -> None:
        words = [
            "-m",
            "megatron_lite",
            "serve",
            "--load",
            str(directory),
            "--port",
            "0",
            "--api-key",
            KEY,
            *flags,
        ]
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "OMP_NUM_THREADS": "1",
        }
        starts = (
            ["-m", "torch.distributed.run", "--nproc-per-node", str(world)] if world > 1 else []
        )
        self.process = subprocess.Popen(
            [sys.executable, *starts, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "serving" in line, self.process.communicate()
        self.url = line.split()[3].rstrip(",")

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
        training=None, adapter=[], stream_weights=False, quantize=None,
    )  # fmt: skip
    return open_model(flags, Parallel(), launch.start(Parallel()))
