"""Support for srun without torchrun: sets torchrun's variables, and starts a rendezvous store that survives any rank."""

import os
import re
import signal
import time
from collections.abc import MutableMapping

from megaconv.errors import UsageError

PORT = "29500"
_LINGER_S = 10.0
"""Time that the store stays after rank 0 ends, so that other ranks can still ask which rank failed first."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in the environment of a task that srun has started together with others.

    Under torchrun, or for a single task, it does nothing. Raises UsageError if the address of rank 0 is unknown.
    """
    rank, world = environment.get("SLURM_PROCID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in environment or not (rank.isdigit() and world.isdigit()) or int(world) < 2:
        return
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    if "MASTER_ADDR" not in environment and nodes != "1":
        raise UsageError(
            f"srun has started {world} processes on {nodes} nodes, but MASTER_ADDR doesn't say where the first one is: export "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", PORT)
    here = tasks_of_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE", world),
        int(environment.get("SLURM_NODEID", "0")),
    )
    environment.update(
        RANK=rank, WORLD_SIZE=world, LOCAL_RANK=environment.get("SLURM_LOCALID", rank), LOCAL_WORLD_SIZE=str(here),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=environment.get("SLURM_RESTART_COUNT", "0"),
    )  # fmt: skip
    if rank == "0":
        _keep_store(int(environment["MASTER_PORT"]))


def tasks_of_node(words: str, node: int) -> int:
    """Return the number of tasks on a node. Slurm writes `8(x2),4` for nodes of 8, 8 and 4 tasks."""
    tasks = [int(match[1]) for match in _TASKS.finditer(words) for _ in range(int(match[2] or 1))]
    return tasks[node] if node < len(tasks) else tasks[-1]


def sees_own_gpu(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether Slurm shows each task only its own GPU, as number 0."""
    return environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"


def _keep_store(port: int) -> None:
    """Run the store in a separate process, as torchrun does, because rank 0 may be the rank that fails."""
    ours, theirs = os.pipe()
    if os.fork():
        os.close(ours)  # the other end closes when this process ends, for whatever reason
        return
    os.close(theirs)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    from torch._C._distributed_c10d import TCPStore

    status = 1
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        os.read(ours, 1)
        time.sleep(_LINGER_S)
        del store
        status = 0
    finally:
        os._exit(status)
