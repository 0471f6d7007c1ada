"""Triton's interpreter computes the packages' real kernels on a CPU, with numpy. It is slow, and needs no GPU.

Import this module before a package that has kernels, in a process with TRITON_INTERPRET=1. Three things differ on a CPU:

* The fastest configuration of a kernel can't be measured. The first one is taken.
* Triton's compiler turns the numbers of a loop into tensors. In the interpreter they are Python's, without the methods of tensors.
* There is no device to choose or to ask.
"""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Number(int):
    """A loop's number. Kernels convert it to another integer type."""

    def to(self, _dtype: Any) -> "Number":
        return self


def numbers(*limits: Any) -> Iterator[Number]:
    """Yield the numbers of a range. Its limits may be tensors of the interpreter."""
    yield from map(Number, builtins.range(*map(int, limits)))


def is_interpreting() -> bool:
    """True if this process interprets kernels. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def prepare() -> None:
    """Make Triton and torch ready for kernels on a CPU. Call it before a package is imported."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = _run_first
    torch.cuda.device = nullcontext
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)


def import_kernels(module: str) -> ModuleType:
    """Import a module with kernels, and prepare the loops of its package. Call prepare() before."""
    found = import_module(module)
    package = module.split(".")[0]
    for name, each in list(sys.modules.items()):
        if name.startswith(f"{package}.ops"):
            vars(each)["range"] = numbers
    return found


def _run_first(self: Any, *args: Any, **keywords: Any) -> Any:
    """Autotuner.run with the first configuration."""
    chosen = self.configs[0]
    # Other parts of a package read the configuration that was the fastest one.
    self.best_config = chosen
    given = {**keywords, **chosen.all_kwargs()}
    if chosen.pre_hook is not None:
        chosen.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **given})
    return self.fn.run(*args, **given)
