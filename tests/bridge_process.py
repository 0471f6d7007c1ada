"""Starts Megatron-Bridge in its own environment, whose Python MEGATRON_BRIDGE_PYTHON names (docs/distributed-checkpoints.md)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bridge_oracle import REPLY

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON") or sys.executable
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_HERE = (
    importlib.util.find_spec("megatron") is not None
    and importlib.util.find_spec("megatron.bridge") is not None
)
NEEDS_BRIDGE = [
    pytest.mark.bridge,
    pytest.mark.oracle,
    pytest.mark.skipif(
        not (os.environ.get("MEGATRON_BRIDGE_PYTHON") or _HERE),
        reason="megatron-bridge is not installed here, and MEGATRON_BRIDGE_PYTHON names no Python that has it",
    ),
]


def ask(module: str, *words: str | Path) -> tuple[list[Any], str]:
    """The replies of a module of tests/ that runs in Bridge's environment, and what it wrote to stderr."""
    command = [PYTHON, "-W", "ignore", "-m", module, *map(str, words)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    replies = [
        json.loads(line.removeprefix(REPLY))
        for line in done.stdout.splitlines()
        if line.startswith(REPLY)
    ]
    return replies, done.stderr
