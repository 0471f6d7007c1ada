"""Starts and ends a process's part in a run: device, process groups, allocator, signals."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megaconv.engine.store_watch import StoreWatch, silence
from megaconv.errors import UsageError
from megatron_lite.loop.failure import KEY, report_alone, report_first
from megatron_lite.loop.heartbeat import BEAT_S, Heartbeat
from megatron_lite.loop.node import node_group
from megatron_lite.loop.slurm import sees_own_gpu
from megatron_lite.settings.config import Parallel

OLDEST_TORCH = (2, 7)
"""Whose autograd goes backward from an edge of the graph, so that a stage needn't keep what it sent."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


@dataclass(frozen=True)
class Place:
    """Where this process is, as torchrun or srun says."""

    rank: int
    world: int
    device: torch.device
    store: Store | None
    """Outlives any one rank; None in a single process."""
    save_group: dist.ProcessGroup | None
    """Of all ranks, on gloo, for checkpoints alone."""
    node: dist.ProcessGroup | None = None
    """Of the ranks on this machine, on gloo; None for one that is alone."""
    watch: StoreWatch | None = None
    heartbeat: Heartbeat | None = None

    def __str__(self) -> str:
        """`4 x cpu, gloo`."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        backend = "one process" if self.world == 1 else "gloo" if self.device.type == "cpu" else "nccl"
        return f"{self.world} x {name}, {backend}"

    def say(self, text: str) -> None:
        """On one rank."""
        if self.rank == 0:
            print(text, flush=True)


def world_size() -> int:
    """Of torchrun or srun; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def start(parallel: Parallel, *, deterministic: bool = False, steps: bool = False) -> Place:
    """Join the other processes. steps: whether Heartbeat.step will be called.

    Raises UsageError for a backend that can't work here, and for a torch that is too old.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise UsageError(
            f"the trainer needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer, found {torch.__version__}"
        )
    device = _device(parallel)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
        os.environ.setdefault(
            "TORCH_GLOO_LAZY_INIT", "1"
        )  # gloo is for checkpoints then: no socket from each rank to each
        if deterministic:
            force_same_bits()
    if world_size() == 1:
        return Place(0, 1, device, None, None)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    met, place, world = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps one store for all of its attempts, and what an earlier one said in it is not for this one.
    store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), met)
    later = timeout + timedelta(seconds=3 * BEAT_S)  # than the heartbeat, which knows who keeps the others waiting
    dist.init_process_group(backend, store=store, rank=place, world_size=world, timeout=later)
    saving = dist.new_group(backend="gloo", timeout=later)
    watch = StoreWatch(_store_address(), _end_without_store)
    return Place(
        place,
        world,
        device,
        store,
        saving,
        node_group(saving, later),
        watch,
        _heartbeat(store, place, world, timeout if steps else None),
    )


def _heartbeat(store: Store, rank: int, world: int, patience: timedelta | None) -> Heartbeat | None:
    """None with a torch before 2.8, which gives no second connection to the store."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is None:
        return None
    own = clone()

    def end(cause: str | None) -> None:
        if cause is not None:
            report_first(cause, own)
        leave(1)

    return Heartbeat(own, rank, world, patience, KEY, end)


def _store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _end_without_store() -> None:
    report_alone(silence(_store_address()))
    leave(1)


def _device(parallel: Parallel) -> torch.device:
    """Raises UsageError where there is a GPU for some of this machine's processes but not for each: nobody wants that."""
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parallel.distributed_backend == "gloo" or (not found and parallel.distributed_backend is None):
        return torch.device("cpu")
    if sees_own_gpu() and found == 1:
        return torch.device("cuda", 0)
    if found < here:
        raise UsageError(
            f"NCCL needs a GPU for each of the {here} processes of a machine, found {found}; start fewer, "
            "or take --distributed-backend gloo, which trains on CPUs"
        )
    return torch.device("cuda", local)


SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What libraries read when they are first used; who has set one of them otherwise is left alone."""


def force_same_bits() -> None:
    """On a GPU, before anything is computed: kernels and collectives that add in one order, by Megatron's recipe. A CPU's always do."""
    for name, value in SAME_BITS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # nothing here reads such memory


def keep_freed_memory() -> None:
    """glibc gives large buffers back to the system after each step, and gets them anew page by page: a fifth of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def end(place: Place) -> None:
    """After a run that went well."""
    if place.world > 1:
        dist.barrier(group=place.save_group)  # nobody leaves while others still talk to them
        for thread in (place.watch, place.heartbeat):
            if thread is not None:
                thread.stop()
        dist.destroy_process_group()


def leave(status: int) -> None:
    """After one that failed: at once, without waiting for threads, collectives, peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Stop:
    """SIGTERM and SIGHUP ask a run to save and end; all ranks agree on it at the end of a step."""

    def __init__(self) -> None:
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._request)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
                signal.signal(signal.SIGHUP, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
