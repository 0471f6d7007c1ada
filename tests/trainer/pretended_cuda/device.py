"""Tensors that are on `cuda:0` for torch, and that the CPU computes. A mix of devices is an error, as on a GPU.

with PretendedGpu() as record:
    x = torch.ones(2, device="cuda") + 1
    x.tolist()                                 # record.waits: one
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests.trainer.pretended_cuda.kernels import ATEN, KERNELS, install_flash
from tests.trainer.pretended_cuda.record import Record, place

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


class GpuTensor(Tensor):
    """A tensor on the pretended GPU. `held`: the same elements on the CPU."""

    held: Tensor

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
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            _RECORD.waits[f"tolist @ {place()}"] += 1
            return args[0].held.tolist()
        if func is Tensor.data_ptr:
            return args[0].held.data_ptr()
        if func is Tensor.untyped_storage:
            return args[0].held.untyped_storage()
        if func is Tensor.numpy:
            raise TypeError("numpy takes no tensor of a GPU")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees operations without a GpuTensor too: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendedGpu:
    """The device while the block runs. Its value is the record."""

    def __enter__(self) -> Record:
        properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
        changes = {
            "_lazy_init": lambda: None,
            "get_device_properties": lambda device: properties,
            "get_device_capability": lambda device=None: (9, 0),
        }
        self._patches = [patch.object(torch.cuda, name, made) for name, made in changes.items()]
        self._mode = _Mode()
        for change in self._patches:
            change.start()
        self._mode.__enter__()
        install_flash()
        _RECORD.clear()
        return _RECORD

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        for change in self._patches:
            change.stop()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    of_gpu = [x for x in tensors if isinstance(x, GpuTensor)]
    of_cpu = [x for x in tensors if not isinstance(x, GpuTensor)]
    wanted = kwargs.get("device")
    target = None if wanted is None else torch.device(wanted).type
    on_gpu = target == "cuda" or (target is None and bool(of_gpu))
    if of_gpu and of_cpu:
        _check_devices(func, of_cpu)
    if of_gpu or on_gpu:
        _note(func, args, kwargs, target, of_gpu, of_cpu)
    found = _compute(func, args, kwargs)
    if func.namespace == "c10d" or not on_gpu:
        return found
    if func is ATEN.copy_.default and not isinstance(args[0], GpuTensor):
        return args[0]
    found = tree_map(_wrapped, found)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _wrapped(found: Any) -> Any:
    plain = isinstance(found, Tensor) and not isinstance(found, GpuTensor)
    return GpuTensor(found) if plain else found


def _held(found: Any) -> Any:
    return found.held if isinstance(found, GpuTensor) else found


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map(_held, args), tree_map(_held, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return KERNELS.get(func, func)(*args, **kwargs)


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
    name = func.name().split("::")[1].split(".")[0]
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
        _RECORD.waits[f"{name} @ {place()}"] += waits
    if name not in NO_KERNEL:
        _RECORD.launches[name] += 1


def _note_copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    if isinstance(target, GpuTensor):
        _note_to_gpu(source)
    elif not (non_blocking and target.is_pinned()):
        _RECORD.waits[f"copy to the host @ {place()}"] += 1


def _note_to_gpu(source: Tensor) -> None:
    if source.dim() and not source.is_pinned():
        _RECORD.unpinned[f"{source.numel() * source.element_size()} bytes @ {place()}"] += 1
