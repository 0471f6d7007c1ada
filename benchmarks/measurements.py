"""Measurements in a process each, with a time limit. Each result is written as soon as it is there.

A later call continues: it leaves out the measurements that have a result.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from turns import ROOT, environment

Result = dict[str, Any]
"""The figures of a measurement, or `failed` with the last line of its errors."""
LAST_ERRORS = 4000
"""Characters of a failed process's errors that the file of results keeps."""
LEAST_S = 20.0
"""A measurement with less time isn't started, because it would not get to its first step."""


def run_all(
    commands: Mapping[str, Sequence[str]],
    limit_s: float,
    results: Path | None,
    total_s: float = math.inf,
) -> dict[str, Result]:
    """Run all commands one after another, and return their results by name.

    The last line that a command prints is its result, in JSON. A command that fails, or takes longer than limit_s, ends no
    other. results: each result becomes a line of JSON at the end of this file; None: no file. total_s: the time for all
    commands; those for which no time is left are not run.
    """
    found = {}
    end = time.monotonic() + total_s
    for name, command in commands.items():
        left_s = end - time.monotonic()
        if left_s < min(LEAST_S, limit_s):
            print(f"{name}: no time left", file=sys.stderr, flush=True)
            continue
        result = _run(command, min(limit_s, left_s))
        if results is not None:
            append(results, {"measurement": name, **result})
        shown = {key: value for key, value in result.items() if key != "errors"}
        print(f"{name}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        found[name] = shown
    return found


def exit_at_sigterm() -> None:
    """End the measurement that runs when this process is terminated. It would hold the memory of the GPU."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def without_result(
    commands: Mapping[str, Sequence[str]], results: Path
) -> dict[str, Sequence[str]]:
    """Return the commands that have no result in the file. Those that failed before come last."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    failed: dict[str, bool] = {}
    for line in map(json.loads, lines):
        if "measurement" in line:
            failed[line["measurement"]] = "failed" in line and failed.get(line["measurement"], True)
    left = [name for name in commands if failed.get(name, True)]
    return {name: commands[name] for name in sorted(left, key=failed.__contains__)}


def append(results: Path, line: Mapping[str, Any]) -> None:
    """Write a line of JSON with the time to the end of a file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": now, **line}) + "\n")


def _run(command: Sequence[str], limit_s: float) -> Result:
    # Files instead of pipes: a compiler's processes would hold pipes open after the end of the measurement.
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        status = _ended(command, limit_s, printed, errors)
        of_errors = _text(errors)
        if status is None:
            cause = f"no result within {limit_s / 60:.3g} minutes"
            return {"failed": cause, "errors": of_errors[-LAST_ERRORS:]}
        if status:
            cause = _last_line(of_errors) or f"ended with status {status}"
            return {"failed": cause, "errors": of_errors[-LAST_ERRORS:]}
        return _figures(_text(printed))


def _ended(command: Sequence[str], limit_s: float, printed: IO[str], errors: IO[str]) -> int | None:
    """Run a command and return its status, or None if it was ended at the limit."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=printed,
        stderr=errors,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _figures(printed: str) -> Result:
    last = _last_line(printed)
    try:
        found = json.loads(last)
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"failed": f"printed no result: {last}"}


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
