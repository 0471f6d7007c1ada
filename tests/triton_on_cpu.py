"""Triton's interpreter computes the packages' real kernels on a CPU, with numpy. It is slow, and needs no GPU.

Import this module before a package that has kernels, in a process with TRITON_INTERPRET=1. Four things differ on a CPU:

* The fastest configuration of a kernel can't be measured. The first one is taken.
* Triton's compiler turns the numbers of a loop into tensors. In the interpreter they are Python's, without the methods of tensors.
* numpy has no bf16. The interpreter multiplies matrices of bf16 as if their bits were integers, unless they become float32 before.
* There is no device to choose or to ask.
"""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NEED_GPU = {"mamba_ssm": 1, "aiter": 3}
"""The number of packages, from the outermost one on, that import libraries for a GPU."""


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


@cache
def prepare() -> None:
    """Make Triton and torch ready for kernels on a CPU. Call it before a package is imported."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = _run_first
    Autotuner.__init__ = _without_key(Autotuner.__init__)
    _multiply_bf16_in_float32()
    torch.cuda.device = nullcontext
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)


def import_kernels(module: str) -> ModuleType:
    """Import a module with kernels, and prepare the loops of its package. Call prepare() before."""
    found = import_without_gpu(module)
    package = module.split(".")[0]
    for name, each in list(sys.modules.items()):
        if name.startswith(f"{package}.ops"):
            vars(each)["range"] = numbers
    return found


def _without_key(create: Any) -> Any:
    """Autotuner.__init__ without the arguments on which the fastest configuration depends.

    Triton 3.9 refuses names of arguments that a kernel doesn't have. Kernels for older versions name some.
    """

    def created(
        self: Any, fn: Any, arg_names: Any, configs: Any, key: Any, *rest: Any, **options: Any
    ) -> None:
        create(self, fn, arg_names, configs, [], *rest, **options)

    return created


def _multiply_bf16_in_float32() -> None:
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            self.cast_impl(each, language.float32)
            if each.dtype.scalar == language.bfloat16
            else each
            for each in (a, b)
        )
        return multiply(self, a, b, *rest)

    InterpreterBuilder.create_dot = multiplied


def import_without_gpu(module: str) -> ModuleType:
    """Import a module without the code of the packages around it that imports libraries for a GPU."""
    names = module.split(".")
    if names[0] not in sys.modules:
        spec = find_spec(names[0])
        assert spec is not None
        folder = Path((spec.submodule_search_locations or [""])[0])
        for number in range(NEED_GPU.get(names[0], 0)):
            package = ModuleType(".".join(names[: number + 1]))
            package.__path__ = [str(folder.joinpath(*names[1 : number + 1]))]
            sys.modules[package.__name__] = package
    return import_module(module)


def _run_first(self: Any, *args: Any, **keywords: Any) -> Any:
    """Autotuner.run with the first configuration."""
    chosen = self.configs[0]
    # Other parts of a package read the configuration that was the fastest one.
    self.best_config = chosen
    given = {**keywords, **chosen.all_kwargs()}
    if chosen.pre_hook is not None:
        chosen.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **given})
    return self.fn.run(*args, **given)
