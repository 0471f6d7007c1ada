"""Reads the logs of runs: the JSON lines of --metrics-file, and TensorBoard events of this trainer or of Megatron-LM.

    {"iteration": 20, "loss": 2.31, "grad_norm": 1.4, "learning_rate": 0.0003, "tokens_per_second": 5120.0, ...}
    {"iteration": 20, "validation_loss": 2.4}

A continued run appends to the same file, and may write a step again. The later line counts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megatron_lite.loop.curve import Points

STEP = "iteration"
_MEGATRON = {
    "lm loss": "loss",
    "lm loss validation": "validation_loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
}
"""Megatron-LM's names in TensorBoard -> names in a metrics file. Source: megatron/training/training.py."""


@dataclass(frozen=True)
class RunLog:
    """The values that a run has logged."""

    name: str
    path: Path
    values: Mapping[str, Points]
    """Name -> (step, value) in the order of steps. A value may be NaN or infinite."""

    @property
    def last_step(self) -> int:
        return max(points[-1][0] for points in self.values.values())

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path), "values": dict(self.values)}


def read_runs(words: Sequence[str]) -> list[RunLog]:
    """Read several runs. A file name that all paths share is left out of their names. Raises UsageError."""
    runs = [read_run(word) for word in words]
    shared = {run.path.name for run in runs}
    if len(runs) == 1 or len(shared) > 1:
        return runs
    return [replace(run, name=run.name.removesuffix(f"/{run.path.name}")) for run in runs]


def read_run(word: str) -> RunLog:
    """Read a run. word: `PATH` or `NAME=PATH`; the path is a metrics file, an event file or a directory with either.

    Raises UsageError.
    """
    name, path = _named(word)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file; give a file of --metrics-file")
    log = _log_in(path) if path.is_dir() else path
    # TensorBoard joins the files of a directory: a continued run has several.
    steps = _events(path) if _is_of_tensorboard(log) else _lines(log)
    found: dict[str, dict[int, float]] = {}
    for value_name, step, value in steps:
        found.setdefault(value_name, {})[step] = value
    # A figure that is null in all lines is one that the run can't compute, such as a CPU's MFU.
    found = {each: points for each, points in found.items() if any(map(isfinite, points.values()))}
    if not found:
        raise UsageError(f"{path}: holds no logged step; give a file of --metrics-file")
    return RunLog(name, path, {each: sorted(points.items()) for each, points in found.items()})


def _named(word: str) -> tuple[str, Path]:
    """Return the name and the path. A path that exists may contain `=` itself."""
    name, sign, path = word.partition("=")
    if sign and name and path and not Path(word).exists():
        return name, local_path(path)
    return word, local_path(word)


def _is_of_tensorboard(path: Path) -> bool:
    return "tfevents" in path.name


def _log_in(directory: Path) -> Path:
    """Return the only metrics file in a directory, or its first file of events. Raises UsageError."""
    found = [each for each in sorted(directory.glob("*.jsonl")) if _is_metrics_file(each)]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"{directory}: holds several metrics files, {names}; give one of them")
    found += sorted(each for each in directory.iterdir() if _is_of_tensorboard(each))
    if not found:
        raise UsageError(
            f"{directory}: holds no log of a run; run with --metrics-file or --tensorboard-dir, and give that file or directory"
        )
    return found[0]


def _is_metrics_file(path: Path) -> bool:
    """Return whether the first line is that of a logged step. Other files of JSON lines hold texts."""
    with path.open("rb") as file:
        line = file.readline(1 << 16)
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and STEP in found


def _lines(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step, value) of a metrics file. Raises UsageError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        # A run that is killed while it writes leaves a last line without an end.
        if not line.strip() or number == len(lines):
            continue
        figures = _figures(line, f"{path}: line {number}")
        step = figures[STEP]
        for name, value in figures.items():
            if value is None:
                yield name, step, nan  # the form of NaN and of infinity in JSON
            elif name != STEP and isinstance(value, int | float) and not isinstance(value, bool):
                yield name, step, float(value)


def _figures(line: str, where: str) -> dict[str, Any]:
    """Return the figures of a line. Raises UsageError."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or type(found.get(STEP)) is not int:
        raise UsageError(
            f'{where} is not that of a logged step, {{"{STEP}": ...}}; give a file of --metrics-file'
        )
    return found


def _events(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step, value) of TensorBoard's scalars. Raises UsageError."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UsageError(
            f"{path}: TensorBoard events need the package tensorboard: pip install tensorboard"
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield _MEGATRON.get(tag, tag), event.step, float(event.value)
