"""`megatron_lite data run`: runs a Python file that defines a pipeline of datatrove, on one machine, Slurm or Ray.

| the file defines | what runs |
|---|---|
| `executor`, or a list `executors` | these executors of datatrove, in order: local ones, Slurm's or Ray's |
| `pipeline` | its steps, with --tasks, --workers and --logs, on this machine |
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megaconv.errors import CheckpointError, UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.pipeline import require_datatrove
from megatron_lite.data.recipes.task_pool import watched_pools

DESCRIPTION = "Run a Python file with a pipeline of datatrove."


@dataclass
class RunReport:
    """The executors that were run."""

    file: str
    executors: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {"file": self.file, "executors": self.executors}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        yield f"{self.file}: ran {', '.join(self.executors)}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "file",
        type=local_path,
        metavar="FILE",
        help="defines `executor`, `executors` or `pipeline`",
    )
    add("--tasks", type=int, default=1, metavar="N", help="tasks of a `pipeline` (1)")
    add("--workers", type=int, default=1, metavar="N", help="processes of a `pipeline` (1)")
    add("--logs", type=local_path, metavar="DIR", help="logs of a `pipeline` (FILE-logs)")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")


def run(given: argparse.Namespace) -> RunReport:
    """Run the file's executors. Raises UsageError, and CheckpointError for a failed step."""
    require_datatrove()
    if given.tasks < 1 or given.workers < 1:
        raise UsageError("--tasks and --workers must be 1 or more")
    executors = _executors(_loaded(given.file), given)
    for executor in executors:
        try:
            with watched_pools():
                executor.run()
        except CheckpointError as error:
            raise CheckpointError(f"{given.file}: {error}") from error
        except Exception as error:  # a user's step may raise anything
            raise CheckpointError(f"{given.file}: {type(error).__name__}: {error}") from error
    return RunReport(str(given.file), [type(executor).__name__ for executor in executors])


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"{path}: there is no such Python file")
    sys.path.insert(0, str(path.absolute().parent))  # processes import the file's steps by name
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _executors(module: ModuleType, given: argparse.Namespace) -> list[Any]:
    several = getattr(module, "executors", None)
    if several is not None:
        return list(several)
    one = getattr(module, "executor", None)
    if one is not None:
        return [one]
    pipeline = getattr(module, "pipeline", None)
    if pipeline is None:
        raise UsageError(f"{given.file}: defines none of `executor`, `executors`, `pipeline`")
    logs = given.logs or given.file.with_name(f"{given.file.stem}-logs")
    local = package("datatrove.executor.local", "data run").LocalPipelineExecutor
    return [local(list(pipeline), tasks=given.tasks, workers=given.workers, logging_dir=str(logs))]
