"""FlashAttention 2 and 3 on a CPU: their own functions, with AMD's kernels in place of those that nvcc compiles.

Both versions have kernels in CUDA. For AMD's GPUs, FlashAttention's sources put kernels in Triton behind the same
functions. These kernels are in the package `amd-aiter`, and Triton's interpreter computes them:

    flash_attn_func                        of the package flash-attn, with its autograd and its padding
      flash_attn_2_cuda.fwd, .bwd          here: AMD's module of the same functions
        kernels in Triton                  by the interpreter, on a CPU

The package flash-attn has the source of FlashAttention 3 too, in a folder `hopper`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests import triton_on_cpu

AMD = "aiter.ops.triton._triton_kernels.flash_attn_triton_amd"
ARCHITECTURE = "gfx1100"
"""AMD's kernels have the smallest blocks for such a GPU: 32 queries and 32 keys. So short sequences have several blocks."""
KERNELS = ("attention_forward_prefill_triton_impl", "attention_backward_triton_impl")
PACKAGES = ("triton", "flash_attn", "aiter")


@cache
def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


class _OnGpu(Tensor):
    """A CPU's tensor. The kernels' functions refuse others than those of a GPU."""

    is_cuda = True


@cache
def prepare() -> None:
    """Make `flash_attn` and `flash_attn_interface` ready to be imported. Raises ImportError if a package is missing."""
    triton_on_cpu.prepare()
    with _as_on_amd():
        triton_on_cpu.import_without_gpu(AMD)
    for version in (2, 3):
        functions = amd_functions(version)
        for name in KERNELS:
            setattr(functions, name, _on_cpu(getattr(functions, name)))
    sys.modules["flash_attn_2_cuda"] = amd_functions(2)
    # The operations of flash_attn are for a GPU only, unless no device is named.
    register = torch.library.custom_op

    def for_all_devices(name: str, /, *, mutates_args: Any, device_types: Any = None) -> Any:
        return register(name, mutates_args=mutates_args)

    with patch.object(torch.library, "custom_op", for_all_devices):
        import_module("flash_attn")
    _prepare_version_3()


def amd_functions(version: int) -> ModuleType:
    """AMD's module with the functions `fwd` and `bwd` that a version of FlashAttention calls."""
    return sys.modules[f"{AMD}.interface_v{version}"]


def _prepare_version_3() -> None:
    """Make `flash_attn_interface` importable. Its package has it at the top."""
    sys.modules["flash_attn_3"] = ModuleType("flash_attn_3")
    sys.modules["flash_attn_3._C"] = ModuleType("flash_attn_3._C")
    spec = find_spec("hopper")
    assert spec is not None
    assert spec.origin is not None
    sys.path.append(str(Path(spec.origin).parent))
    module = import_module("flash_attn_interface")
    vars(module)["flash_attn_3_cuda"] = amd_functions(3)


@contextmanager
def _as_on_amd() -> Iterator[None]:
    """The answers of an AMD GPU, for the code that chooses kernels."""
    from triton.runtime import driver

    target = SimpleNamespace(backend="hip", arch=ARCHITECTURE, warp_size=32)
    active = SimpleNamespace(get_current_target=lambda: target)
    with (
        patch.object(driver, "_active", active),
        patch.object(torch.cuda, "current_device", lambda: None),
    ):
        yield


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which then takes tensors of a CPU."""

    def pretended(found: Any) -> Any:
        return found.as_subclass(_OnGpu) if isinstance(found, Tensor) else found

    @wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        given = {name: pretended(each) for name, each in keywords.items()}
        with _as_on_amd():
            return function(*map(pretended, args), **given)

    return called
