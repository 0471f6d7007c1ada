"""Tensors that are on `cuda:0` for torch, and that the CPU computes. A mix of devices is an error, as on a GPU.

with PretendedGpu() as record:
    x = torch.ones(2, device="cuda") + 1
    x.tolist()                                 # record.waits: one
"""

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests.trainer.pretended_cuda import streams
from tests.trainer.pretended_cuda.generators import default_generator, draw, is_random
from tests.trainer.pretended_cuda.kernels import (
    ATEN,
    KERNELS,
    fits_flash,
    flash_sdpa,
    fused_rms_norm,
    install_flash,
    refuse_grouped_mask,
)
from tests.trainer.pretended_cuda.record import Record, place
from tests.trainer.pretended_cuda.streams import STREAMS, memory_of

GPU = torch.device("cuda", 0)
WAITS = {
    ATEN._local_scalar_dense.default: 1,
    ATEN.nonzero.default: 1,
    ATEN.masked_select.default: 1,
    ATEN.bincount.default: 2,
    ATEN.equal.default: 1,
    ATEN._unique2.default: 1,
    ATEN.unique_consecutive.default: 1,
}
"""Operations whose result the host reads, and how often it waits."""
INDEXES = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
"""They copy indices from the CPU, which are pageable, and wait for them."""
TAKES_BOTH_DEVICES = {ATEN.copy_.default, ATEN._to_copy.default, *INDEXES}
NO_KERNEL = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh",
    "new_empty", "new_empty_strided", "permute", "_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "_unsafe_view", "unsqueeze", "view",
}  # fmt: skip
"""Operations that only make views or allocate."""


class MixedDevices(RuntimeError):
    """An operation has tensors on the CPU and on the GPU."""


_RECORD = Record()
_HOST = {"device": "cpu"}
"""The device that holds the elements: `cpu`, or `meta` if only shapes are computed."""


class GpuTensor(Tensor):
    """A tensor on the pretended GPU. `held`: the same elements on the CPU. `memory`: the uses of its storage."""

    held: Tensor
    memory: streams.Memory

    @staticmethod
    def __new__(cls, held: Tensor) -> "GpuTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=GPU,
        )
        made.held, made.memory = held, memory_of(held)
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    # Methods, as __torch_function__ is off while an operation saves tensors for its backward pass.

    def record_stream(self, stream: Any) -> None:
        self.memory.record_stream(stream)

    def tolist(self) -> Any:
        _note_wait("tolist", 1)
        return _to_host(self.held).tolist()

    def data_ptr(self) -> int:
        return _address(self.held)

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("numpy takes no tensor of a GPU")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # not called as a method
            return cls.tolist(*args)
        if func is F.scaled_dot_product_attention:
            refuse_grouped_mask(*args, **(kwargs or {}))
            func = flash_sdpa if fits_flash(*args, **(kwargs or {})) else func
        if func is F.rms_norm:
            func = fused_rms_norm
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees operations without a GpuTensor too: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func) and func not in KERNELS:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operation consists of others. In inference mode such operations come here whole."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return found


class PretendedGpu:
    """The device while the block runs. Its value is the record. Raises StreamRace at the end.

    shapes_only: tensors have no elements, so that large models fit; numbers that the host reads are 1.
    """

    def __init__(self, *, shapes_only: bool = False) -> None:
        self._host = {"device": "meta" if shapes_only else "cpu"}

    def __enter__(self) -> Record:
        _HOST.update(self._host)
        # torch.cuda.random has names of its own for some of the functions.
        self._patches = [
            patch.object(module, name, made)
            for name, made in _functions().items()
            for module in (torch.cuda, torch.cuda.random)
            if hasattr(module, name)
        ]
        self._mode = _Mode()
        for change in self._patches:
            change.start()
        self._mode.__enter__()
        # torch.tensor() then makes a CPU's tensor and copies it, which the mode sees.
        torch._C._set_only_lift_cpu_tensors(True)
        install_flash()
        _RECORD.clear()
        STREAMS.races.clear()
        return _RECORD

    def __exit__(self, kind: Any, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        _HOST["device"] = "cpu"
        self._mode.__exit__(kind, *error)
        for change in self._patches:
            change.stop()
        if kind is None:
            STREAMS.finish()


def _functions() -> dict[str, Any]:
    """Return the replacements of torch.cuda's functions and classes by name."""
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    return {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "default_generators": (default_generator(),),
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "device": streams.Device,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream,
        "current_stream": lambda device=None: STREAMS.current,
        "default_stream": lambda device=None: STREAMS.default,
        "synchronize": lambda device=None: STREAMS.synchronize(),
    }


def held_of(found: Any) -> Any:
    """Return the CPU's tensor of a GpuTensor, and anything else as it is."""
    return found.held if isinstance(found, GpuTensor) else found


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    of_gpu, of_cpu = _by_device(args, kwargs)
    wanted = kwargs.get("device")
    target = None if wanted is None else torch.device(wanted).type
    on_gpu = target == "cuda" or (target is None and bool(of_gpu))
    if of_gpu and of_cpu:
        _check_devices(func, of_cpu)
    if of_gpu or on_gpu:
        _note(func, args, kwargs, target, of_gpu, of_cpu)
        _use_memory(func, args, kwargs)
    between = func is ATEN.copy_.default and bool(of_gpu and of_cpu)
    if between and _is_pinned_copy(*args, **kwargs):
        return args[0]
    found = _compute(func, args, kwargs, on_gpu=on_gpu)
    if func is ATEN._to_copy.default and on_gpu and of_cpu and kwargs.get("non_blocking"):
        _note_pinned_source(of_cpu[0])
    if between and not isinstance(args[0], GpuTensor):
        return args[0]
    if func.namespace == "c10d" or not on_gpu:
        return found
    return _as_gpu_tensors(func, args, kwargs, found, of_gpu)


def _by_device(args: Any, kwargs: Any) -> tuple[list[GpuTensor], list[Tensor]]:
    """Return the tensors on the GPU and those on the CPU."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    of_gpu = [x for x in tensors if isinstance(x, GpuTensor)]
    return of_gpu, [x for x in tensors if not isinstance(x, GpuTensor)]


def _as_gpu_tensors(func: Any, args: Any, kwargs: Any, found: Any, of_gpu: list[GpuTensor]) -> Any:
    """Wrap the results. Views share the memory of their base."""
    # A view of a tensor from outside inference mode has a version counter, as its base has.
    counted = _is_view(func) and not any(x.is_inference() for x in of_gpu)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not counted):
        found = tree_map(_wrapped, found)
    return return_and_correct_aliasing(func, args, kwargs, found)


@cache
def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _wrapped(found: Any) -> Any:
    plain = isinstance(found, Tensor) and not isinstance(found, GpuTensor)
    return GpuTensor(found) if plain else found


def _compute(func: Any, args: Any, kwargs: dict[str, Any], *, on_gpu: bool) -> Any:
    args, kwargs = tree_map(held_of, args), tree_map(held_of, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device(_HOST["device"] if on_gpu else "cpu")}
    kernel = KERNELS.get(func, func) if on_gpu else func
    if not on_gpu and _HOST["device"] == "meta":
        args, kwargs = tree_map(_to_host, args), tree_map(_to_host, kwargs)
    if on_gpu and is_random(func):
        return draw(kernel, args, kwargs)
    return kernel(*args, **kwargs)


def _to_host(found: Any) -> Any:
    """Return a tensor of ones in place of one without elements, and anything else as it is."""
    if isinstance(found, Tensor) and found.is_meta:
        return torch.ones(found.shape, dtype=found.dtype)
    return found


def _address(held: Tensor) -> int:
    """Return a number that only tensors with the same first element have."""
    if not held.is_meta:
        return held.data_ptr()
    storage: int = held.untyped_storage()._cdata
    return storage + held.storage_offset() * held.element_size()


def _is_pinned_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Copy between pinned memory and the GPU later, if the copy does not block. Returns whether it is such a copy."""
    to_host = not isinstance(target, GpuTensor)
    pinned, other = (target, source) if to_host else (source, target)
    if not non_blocking or not pinned.is_pinned():
        return False
    if to_host:
        STREAMS.copy_later(pinned, held_of(other).to(pinned.dtype), to_host=True)
        return True
    arriving = STREAMS.arriving(pinned)
    if arriving is None:
        held_of(other).copy_(pinned)
        _note_pinned_source(pinned)
    else:  # the host has not waited for the copy to this memory, but the GPU's order is right
        held_of(other).copy_(arriving)
        STREAMS.current.begin()
    return True


def _note_pinned_source(source: Tensor) -> None:
    """Let the host leave the source of a copy that does not block unchanged until the copy's end."""
    if source.is_pinned():
        STREAMS.copy_later(source, source, to_host=False)


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (index, name) of the arguments that an operation writes."""
    arguments = func._schema.arguments
    return tuple(
        (index, each.name)
        for index, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def _use_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note the uses of memory by an operation. Raises StreamRace."""
    if _name(func) in NO_KERNEL or func.namespace == "c10d":
        return
    number = STREAMS.current.begin()
    places = _written_places(func)
    written = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    ids = {id(x) for x in tree_leaves(written)}
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, GpuTensor):
            x.memory.use(STREAMS.current, number, writes=id(x) in ids)


def _name(func: Any) -> str:
    """Return an operation's name without namespace and overload."""
    full: str = func.name()
    return full.split("::")[1].split(".")[0]


def _check_devices(func: Any, of_cpu: list[Tensor]) -> None:
    """Raise MixedDevices. A single number on the CPU is allowed, as on a GPU."""
    if func in TAKES_BOTH_DEVICES or all(x.dim() == 0 for x in of_cpu):
        return
    raise MixedDevices(f"{func} takes tensors on cpu and on cuda:0 @ {place()}")


def _note(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    target: str | None,
    of_gpu: list[GpuTensor],
    of_cpu: list[Tensor],
) -> None:
    """Record launches, waits and copies of one operation."""
    name = _name(func)
    without_size = kwargs.get("output_size") is None
    waits = WAITS.get(func, 0)
    if func is ATEN.repeat_interleave.Tensor and without_size:
        waits = 1
    if func is ATEN.copy_.default and of_cpu:
        _note_copy(args[0], args[1], non_blocking=bool(kwargs.get("non_blocking") or args[2:]))
    elif func is ATEN._to_copy.default and target == "cpu" and of_gpu:
        waits = 1
    elif (func is ATEN._to_copy.default and target == "cuda" and of_cpu) or (
        func in INDEXES and of_cpu
    ):
        _note_to_gpu(of_cpu[0])
    if waits:
        _note_wait(name, waits)
    if name not in NO_KERNEL:
        _RECORD.launches[name] += 1


def _note_copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    if isinstance(target, GpuTensor):
        _note_to_gpu(source)
    elif not (non_blocking and target.is_pinned()):
        _note_wait("copy to the host", 1)


def _note_wait(name: str, times: int) -> None:
    """Record that the host waits for the current stream."""
    _RECORD.waits[f"{name} @ {place()}"] += times
    STREAMS.current.synchronize()


def _note_to_gpu(source: Tensor) -> None:
    if source.dim() and not source.is_pinned():
        _RECORD.unpinned[f"{source.numel() * source.element_size()} bytes @ {place()}"] += 1
