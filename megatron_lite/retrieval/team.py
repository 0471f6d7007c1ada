"""The processes that share the work: one, or those of torchrun or srun."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """This process among those that share the work."""

    rank: int
    size: int
    place: Any = None
    """This process's launch.Place; None for a single process, which is not connected."""

    def wait(self) -> None:
        """Wait for all processes, so that each one finds the files of the others."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's part: every size-th item."""
        return items[self.rank :: self.size]

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def run_as_team(work: Callable[[Team], None], backend: str | None = "gloo") -> None:
    """Call work() in this process. Under torchrun or srun the processes are connected first; an error then ends all of them.

    backend: `gloo` for CPUs; None takes a GPU for each process where there are GPUs.
    A single process needs no torch. Raises CheckpointError in a single process.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        work(Team(0, 1))
        return
    from megatron_lite.processes import launch
    from megatron_lite.processes.failure import report
    from megatron_lite.settings.parallel import Parallel

    place: launch.Place | None = None
    try:
        place = launch.start(Parallel(distributed_backend=backend))
        work(Team(place.rank, place.world, place))
        launch.end(place)
    except KeyboardInterrupt:
        launch.leave(130)
    except Exception as error:
        launch.leave(report(error, f"rank {launch.rank()}", place.store if place else None))
