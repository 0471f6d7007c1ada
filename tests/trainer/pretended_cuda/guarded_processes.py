"""Compiles guard.cpp, and starts processes in which torch finds a pretended CUDA device."""

import os
import shutil
import subprocess
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch

from tests.trainer.parallel.worlds import World

SOURCE = Path(__file__).with_name("guard.cpp")
TORCH = Path(torch.__file__).parent


def reason_to_skip() -> str | None:
    """Return why CUDA can't be pretended here; None if it can."""
    if torch.version.cuda is not None:
        return "CUDA is pretended only with a CPU build of torch"
    if shutil.which("g++") is None:
        return "the compiler g++ is not installed"
    return None


def compile_guard(directory: Path) -> Path:
    """Compile guard.cpp into the directory, and return the library."""
    library = directory / "libpretended_cuda.so"
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    links = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC"]
    command = ["g++", *options, *includes, str(SOURCE), *links, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class PretendedWorld(World):
    """Processes that load the library before torch."""

    context = get_context("spawn")

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(directory)
        self._environment = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(TORCH / "lib")}

    def _start(self) -> Connection:
        with patch.dict(os.environ, self._environment):
            return super()._start()
