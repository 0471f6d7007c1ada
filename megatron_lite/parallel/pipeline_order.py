"""Pipeline parallelism: the messages of each pass and all operations of a rank in order, as pure functions.

The order of the passes is in megaconv/planning/pipeline_order.py. Stage s of the model is chunk s // pp on rank s % pp.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megaconv.planning.pipeline_order import Action


class Edge(NamedTuple):
    """The other side of a message."""

    pp_rank: int
    tag: int
    """Unique among all messages of a step between two ranks."""
    wraps: bool
    """True between the last pipeline rank and the first."""


def edge(action: Action, pp: int, vpp: int, pp_rank: int, *, outgoing: bool) -> Edge | None:
    """Return the message that an action needs, or (outgoing) sends; None at the ends of the model."""
    stage = action.chunk * pp + pp_rank
    to_next = outgoing != action.backward
    other = stage + 1 if to_next else stage - 1
    if not 0 <= other < pp * vpp:
        return None
    boundary = min(stage, other)
    # Unique for each microbatch, boundary between stages, and direction.
    tag = (action.microbatch * pp * vpp + boundary) * 2 + action.backward
    return Edge(other % pp, tag, boundary % pp == pp - 1)


class Operation(NamedTuple):
    """One operation of a rank in a step."""

    kind: str
    """`post` (request a message), `wait` (for the message), `compute`, or `send`."""
    action: Action
    edge: Edge | None = None
    """The message; None for `compute`."""


def program(actions: Sequence[Action], pp: int, vpp: int, pp_rank: int) -> Iterator[Operation]:
    """Yield all operations of a rank in order.

    The next message is requested before the current pass is computed, so that it arrives during the pass.
    """
    incoming = [edge(action, pp, vpp, pp_rank, outgoing=False) for action in actions]
    if incoming and incoming[0] is not None:
        yield Operation("post", actions[0], incoming[0])
    for number, action in enumerate(actions):
        message = incoming[number]
        if message is not None:
            yield Operation("wait", action, message)
        following = number + 1
        if following < len(actions) and incoming[following] is not None:
            yield Operation("post", actions[following], incoming[following])
        yield Operation("compute", action)
        outgoing = edge(action, pp, vpp, pp_rank, outgoing=True)
        if outgoing is not None:
            yield Operation("send", action, outgoing)


def last_backward(actions: Sequence[Action]) -> set[Action]:
    """Return each chunk's last backward pass of a step, which completes the chunk's gradients."""
    return set({action.chunk: action for action in actions if action.backward}.values())
