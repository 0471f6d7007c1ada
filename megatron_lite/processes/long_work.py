"""Work of one rank that the other ranks wait for, however long it takes.

A call of a group fails after --distributed-timeout-minutes. The waiting ranks therefore make many short calls.
"""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

SIGN_S = 10.0
"""Time between two signs of rank 0 that it still works."""
_WORKING, _DONE = 1, 0


def on_rank_0(work: Callable[[], None], rank: int, group: dist.ProcessGroup | None) -> None:
    """Do some work on rank 0, while the other ranks wait. Collective.

    group: all ranks; None for a single process. Rank 0 raises the error of the work. The failure of rank 0 then ends the
    other ranks.
    """
    if group is None:
        work()
    elif rank == 0:
        _work_and_tell(work, group)
    else:
        while _sign(_WORKING, group) == _WORKING:
            pass


def _work_and_tell(work: Callable[[], None], group: dist.ProcessGroup) -> None:
    failures: list[BaseException] = []

    def try_to_work() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=try_to_work, name="long work", daemon=True)
    thread.start()
    thread.join(SIGN_S)
    while thread.is_alive():
        _sign(_WORKING, group)
        thread.join(SIGN_S)
    if failures:
        raise failures[0]
    _sign(_DONE, group)


def _sign(state: int, group: dist.ProcessGroup) -> int:
    """Send the state of rank 0 to all ranks. Returns it."""
    sent = torch.tensor(state)
    dist.broadcast(sent, 0, group=group)
    return int(sent)
