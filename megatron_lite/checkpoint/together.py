"""Steps of a save that all ranks take together. An error of one rank ends all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from formats.errors import CheckpointError

T = TypeVar("T")


class SaveError(CheckpointError):
    """A checkpoint could not be written. Older checkpoints are unchanged."""


def of_all(call: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Return the results of all ranks. Collective over the group (None: a single process).

    A rank on which call() raises CheckpointError or OSError raises it again. All others then raise SaveError.
    """
    if group is None:
        return [call()]
    error: CheckpointError | OSError | None = None
    result: Any = None
    try:
        result = call()
    except (CheckpointError, OSError) as found:
        error = found
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, (_reason(error), result), group=group)
    for rank, (failed, _) in enumerate(results):
        if failed is not None:
            raise error or SaveError(f"rank {rank} can't save: {failed}")
    return [value for _, value in results]


def _reason(error: CheckpointError | OSError | None) -> str | None:
    if error is None:
        return None
    return str(getattr(error, "strerror", None) or error)
