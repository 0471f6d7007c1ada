"""Processes that run functions of the tests together: started once, with new groups for every function.

with World(directory) as world:
    results = world.run(4, train, case)      # train(rank, case) in 4 processes; what each returned
"""

import gc
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from tests.trainer.forks import FORKS

TIMEOUT = timedelta(seconds=60)


class RankFailed(Exception):
    """Says what every rank said."""


class World:
    """The parent's side. Processes start when they are first needed, and anew after one has failed."""

    context: ClassVar[Any] = FORKS
    """The context of multiprocessing, which decides how processes start."""

    def __init__(self, directory: Path) -> None:
        """directory: an empty one, where processes find each other."""
        self._directory, self._count = directory, 0
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(rank, *arguments) on each of `size` ranks of a process group. function: of a module, not a closure."""
        new = [self._start() for _ in range(size - len(self._ranks))]
        for (
            pipe
        ) in new:  # importing torch takes longer on a busy machine than ranks wait for each other
            pipe.recv()
        self._count += 1
        meeting = self._directory / f"meeting-{self._count}"
        ranks = self._ranks[:size]
        for _, pipe in ranks:
            pipe.send((meeting, size, function, arguments))
        replies = []
        for process, pipe in ranks:
            try:
                replies.append(
                    pipe.recv()
                    if pipe.poll(4 * TIMEOUT.total_seconds())
                    else ("failed", "no answer")
                )
            except EOFError:
                replies.append(("failed", f"ended with status {process.exitcode}"))
        if any(word != "done" for word, _ in replies):
            self._stop()
            raise RankFailed(
                "\n".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(replies))
            )
        return [value for _, value in replies]

    def _start(self) -> Connection:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=serve, args=(len(self._ranks), theirs), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))
        return ours

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []


def serve(rank: int, pipe: Connection) -> None:
    """A rank's side: until the parent goes away, or a function raises."""
    import torch
    import torch.distributed as dist

    import megatron_lite.engine  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a later collection looks at the objects of functions alone
    pipe.send("ready")
    while True:
        try:
            meeting, size, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if size > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=size,
                    timeout=TIMEOUT,
                )
            value = function(rank, *arguments)
            if size > 1:
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            raise
        pipe.send(("done", value))
        # A group ends its three threads when nothing refers to it. Engines refer to groups, and to themselves.
        del function, arguments, value
        gc.collect()
