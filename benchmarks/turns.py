"""Contenders that take turns, each in a process of its own, so that a busy machine is busy for all of them alike."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
READY = "ready\n"
Figures = dict[str, Any]
Name = TypeVar("Name")


def environment() -> dict[str, str]:
    """The environment of a process that imports this checkout, before the directories of the user's PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def answer(turn: Callable[[], Figures]) -> None:
    """Run the process of a contender after its warm-up: a turn for each line that it receives, and a line of JSON
    about it."""
    print(READY, end="", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


def rounds(commands: Mapping[Name, list[str]], count: int) -> list[dict[Name, Figures]]:
    """The answers of all contenders, round by round. Every second round goes through them backwards.

    commands: each ends in `answer`. They are started one after another, when the one before has warmed up.
    """
    contenders = {name: _Contender(command) for name, command in commands.items()}
    found = []
    for number in range(count):
        turns = list(contenders.items())
        found.append(
            {name: contender.ask() for name, contender in (turns if number % 2 else turns[::-1])}
        )
    for contender in contenders.values():
        contender.end()
    return found


class _Contender:
    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for line in self._out:
            if line == READY:
                return
        raise SystemExit(f"{' '.join(command)}: exit status {self._process.wait()}")

    def ask(self) -> Figures:
        self._in.write("turn\n")
        self._in.flush()
        found: Figures = json.loads(self._out.readline())
        return found

    def end(self) -> None:
        self._process.communicate()
