"""--profile: profiles some steps of chosen ranks, as marks for nsys or as a trace of PyTorch. Steps count as in Megatron."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from megaconv.errors import UsageError
from megatron_lite.settings.config import Logging

_CUDA: Any = torch.cuda  # its functions have no type hints
_PROFILER: Any = torch.autograd.profiler
DIRECTORY = "profile"
"""Directory of traces, below --tensorboard-dir or --save."""


class Recorder(Protocol):
    """Records steps between start and stop."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Trace:
    """Operations and, on a GPU, kernels, as a chrome trace."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.path))


class Marks:
    """Marks for `nsys profile --capture-range=cudaProfilerApi`, which records from start to stop."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def start(self) -> None:
        _CUDA.cudart().cudaProfilerStart()
        self._open.enter_context(_PROFILER.emit_nvtx(record_shapes=True))

    def stop(self) -> None:
        torch.cuda.synchronize()
        self._open.close()
        _CUDA.cudart().cudaProfilerStop()


class Profile:
    """The profile of one rank. Call after(0) before the first step of a new run."""

    def __init__(self, first: int, last: int, recorder: Recorder | None) -> None:
        """Profile steps first + 1 to last, counted from 1. recorder None: this rank is not profiled."""
        self._first, self._last, self._recorder = first, last, recorder
        self._started = False

    def after(self, iteration: int) -> None:
        """Report the number of completed steps."""
        if self._recorder is None:
            return
        if not self._started and self._first <= iteration < self._last:
            self._started = True
            self._recorder.start()
        elif self._started and iteration >= self._last:
            self.end()

    def end(self) -> None:
        """Stop recording, also if the run ends before the last profiled step."""
        if self._started and self._recorder is not None:
            self._recorder.stop()
            self._recorder = None


def make_profile(logging: Logging, save: str | None, rank: int, device: torch.device) -> Profile:
    """Return this rank's profile. Raises UsageError, on every rank alike, for nsys marks without a GPU."""
    first, last = logging.profile_step_start, logging.profile_step_end
    if logging.profile and not logging.use_pytorch_profiler and device.type != "cuda":
        raise UsageError(
            "--profile marks steps of a GPU for nsys; on a CPU it needs --use-pytorch-profiler"
        )
    recorder: Recorder | None = None
    if logging.profile and rank in logging.profile_ranks:
        recorder = Marks()
        if logging.use_pytorch_profiler:
            name = f"rank-{rank}.steps-{first + 1}-{last}.json"
            recorder = Trace(
                Path(logging.tensorboard_dir or save or ".") / DIRECTORY / name, device
            )
    return Profile(first, last, recorder)
