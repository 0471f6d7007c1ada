"""Triton's compiler makes a package's kernels for an H100, on a machine without a GPU. A launch compiles and computes nothing.

    with compiling() as kernels:
        package.function(...)          # on tensors of a CPU
    kernels["the_kernel"].shared       # bytes of shared memory

A kernel with several configurations is compiled until one fits the GPU, from the last configuration on: the last ones
are mostly the smallest. Triton takes the fastest of those that fit.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

SHARED = 227 * 1024
"""Bytes of shared memory that a block of an H100 can have."""
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    shared_memory_per_block_optin=SHARED,
)


class Compiled(NamedTuple):
    """A kernel for the GPU."""

    binary: bytes
    shared: int
    """Bytes of shared memory that a block needs."""


class _Driver:
    """The answers of a driver whose GPU is an H100."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED})

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling() -> Iterator[dict[str, Compiled]]:
    """Compile the kernels that the block launches. The value receives them by name."""
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    found: dict[str, Compiled] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: Any, **keywords: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **keywords)
        found[self.__name__] = Compiled(made.asm["cubin"], made.metadata.shared)
        return made

    def until_one_fits(self: Any, *args: Any, **keywords: Any) -> Any:
        for config in reversed(self.configs):
            self.best_config = config
            made = self.fn.run(*args, **keywords, **config.all_kwargs())
            if made.metadata.shared <= SHARED:
                break
        return made

    with ExitStack() as stack:
        for change in (
            patch.object(driver, "_active", _Driver()),
            patch.object(JITFunction, "run", compile_only),
            patch.object(Autotuner, "run", until_one_fits),
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "device", nullcontext),
            patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            patch.object(torch.cuda, "get_device_properties", lambda *_: PROPERTIES),
        ):
            stack.enter_context(change)
        yield found
