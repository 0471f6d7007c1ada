"""Measurements in a process each, with a time limit. Each result is written as soon as it is there."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from turns import ROOT, environment

Result = dict[str, Any]
"""The figures of a measurement, or `failed` with the last line of its errors."""
LAST_ERRORS = 4000
"""Characters of a failed process's errors that the file of results keeps."""


def run_all(
    commands: Mapping[str, Sequence[str]], limit_s: float, results: Path | None
) -> dict[str, Result]:
    """Run all commands one after another, and return their results by name.

    The last line that a command prints is its result, in JSON. A command that fails, or takes longer than limit_s, ends no
    other. results: each result becomes a line of JSON at the end of this file; None: no file.
    """
    found = {}
    for name, command in commands.items():
        result = _run(command, limit_s)
        if results is not None:
            append(results, {"measurement": name, **result})
        shown = {key: value for key, value in result.items() if key != "errors"}
        print(f"{name}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        found[name] = shown
    return found


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
            cause = f"no result within {limit_s / 60:g} minutes"
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
