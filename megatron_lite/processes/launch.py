"""Starts and ends a process's part in a run: device, process groups, allocator."""

import ctypes
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous

from megaconv.engine.store_watch import StoreWatch, is_kept_by_torchrun, silence
from megaconv.errors import UsageError
from megatron_lite.processes.calls import CALLS
from megatron_lite.processes.failure import KEY, TrainingError, report_alone, report_first
from megatron_lite.processes.heartbeat import Heartbeat
from megatron_lite.processes.interfaces import explained
from megatron_lite.processes.node import node_group
from megatron_lite.processes.slurm import sees_own_gpu
from megatron_lite.settings.parallel import Parallel

HEAD_START_S = 60.0
"""Time from --distributed-timeout-minutes until calls of groups fail. The heartbeat reports the cause meanwhile."""

OLDEST_TORCH = (2, 9)
"""The first torch whose backward pass can start from any edge of the graph. A stage then needn't keep its output."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


@dataclass(frozen=True)
class Place:
    """This process among all processes, from torchrun or srun."""

    rank: int
    world: int
    device: torch.device
    store: Store | None
    """Survives the end of any rank; None in a single process."""
    save_group: dist.ProcessGroup | None
    """All ranks, on gloo, for checkpoints only."""
    node: dist.ProcessGroup | None = None
    """The ranks on this machine, on gloo; None if there is only one."""
    watch: StoreWatch | None = None
    heartbeat: Heartbeat | None = None
    timeout: timedelta | None = None
    """The time that a call of any group waits for other ranks; None in a single process."""

    def __str__(self) -> str:
        """Return a text such as `4 x cpu, gloo`."""
        is_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if is_gpu else self.device.type
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        if self.world == 1:
            backend = "one process"
        return f"{self.world} x {name}, {backend}"

    def say(self, text: str) -> None:
        """Print on rank 0. Raises TrainingError if nothing reads the output any more."""
        if self.rank:
            return
        try:
            print(text, flush=True)
        except BrokenPipeError as error:
            raise TrainingError(
                "standard output was closed, as by `| head`; write it to a file to keep the run alive"
            ) from error


def world_size() -> int:
    """Return the world size from torchrun or srun; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank from torchrun or srun; 0 without them."""
    return int(os.environ.get("RANK", "0"))


def start(parallel: Parallel, *, deterministic: bool = False, steps: bool = False) -> Place:
    """Join the other processes. steps: whether Heartbeat.step will be called.

    Raises UsageError for a backend that does not work here, and for a torch that is too old.
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
        # On GPUs gloo is for checkpoints only, so don't connect all pairs of ranks.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if deterministic:
            force_same_bits()
    if world_size() == 1:
        return Place(0, 1, device, None, None)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # torchrun's store runs before its ranks do. srun may start the rank that has the store last.
    watch = _watch_store() if is_kept_by_torchrun() else None
    met, place, world = _meet(timeout)
    # torchrun keeps one store for all attempts. The prefix hides the keys of earlier attempts.
    store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), met)
    # Later than the heartbeat, which knows the rank that blocks the others.
    later = timeout + timedelta(seconds=HEAD_START_S)
    with explained():
        # No device_id: with one, torch would send single messages in order with all other calls of a group. torch 2.15 sets
        # one by itself; grid.py has another backend for messages there.
        dist.init_process_group(backend, store=store, rank=place, world_size=world, timeout=later)
        saving = dist.new_group(backend="gloo", timeout=later)
        node = node_group(saving, later)
    watch = watch or _watch_store()
    return Place(
        place,
        world,
        device,
        store,
        saving,
        node,
        watch,
        _heartbeat(store, place, world, timeout if steps else None),
        later,
    )


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Connect to the store of the rendezvous. Returns the store, the rank and the number of ranks. Raises TrainingError."""
    try:
        store, place, world = next(rendezvous("env://", timeout=timeout))
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TrainingError(
            f"can't connect to rank 0 at {_store_address()}: {reason}. "
            "Check that rank 0 has started, and that MASTER_ADDR and MASTER_PORT name its machine"
        ) from error
    return store, place, world


def _watch_store() -> StoreWatch:
    return StoreWatch(_store_address(), _end_without_store)


def _heartbeat(store: Store, rank: int, world: int, patience: timedelta | None) -> Heartbeat:
    """Start the heartbeat, with a second connection to the store."""
    own: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs omit it

    def end(cause: str | None) -> None:
        if cause is not None:
            report_first(cause, own)
        leave(1)

    return Heartbeat(own, rank, world, patience, KEY, CALLS.counts, end)


def _store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _end_without_store() -> None:
    report_alone(silence(_store_address()))
    leave(1)


def _device(parallel: Parallel) -> torch.device:
    """Return this process's device. Raises UsageError if NCCL is used and there is no GPU for each process of this machine."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parallel.distributed_backend == "gloo" or (
        not found and parallel.distributed_backend is None
    ):
        return torch.device("cpu")
    if sees_own_gpu() and found == 1:
        return torch.device("cuda", 0)
    if found < here:
        raise UsageError(
            f"NCCL needs a GPU for each of the {here} processes of a machine, found {found}; start fewer, "
            "or take --distributed-backend gloo, which trains on CPUs"
        )
    return torch.device("cuda", local)


SAME_BITS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Environment variables that libraries read at their first use. Values that the user set are kept."""


def force_same_bits() -> None:
    """Make kernels and collectives on a GPU add in a fixed order, by Megatron's recipe. A CPU always does.

    Call it before anything is computed.
    """
    for name, value in SAME_BITS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # nothing here reads such memory


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. It would return large buffers after each step and fetch them page by page again.

    Without this setting, that takes a fifth of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def end(place: Place) -> None:
    """End a successful run."""
    if place.world > 1:
        # No rank leaves while others still communicate with it.
        dist.barrier(group=place.save_group)
        for thread in (place.watch, place.heartbeat):
            if thread is not None:
                thread.stop()
        dist.destroy_process_group()


def leave(status: int) -> None:
    """End a failed run at once, without waiting for threads, collectives or peers."""
    with suppress(BrokenPipeError):  # nobody reads it any more
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
