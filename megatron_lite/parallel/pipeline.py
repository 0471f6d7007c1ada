"""Pipeline parallelism: the order of passes on each rank, a pure function, and what walks through it.

Stage s of the model is chunk s // pp on pipeline rank s % pp. Sources of the orders: 1F1B from PipeDream-Flush
(arXiv:2006.09503), interleaving from Megatron-LM (arXiv:2104.04473).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import Work

from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Channel, Grid
from megatron_lite.parallel.payload import MOST_TENSORS, Payload, Wires


class Action(NamedTuple):
    """A forward or backward pass of one microbatch through one chunk of this rank."""

    backward: bool
    chunk: int
    microbatch: int


def forward_order(pp: int, vpp: int, microbatches: int) -> list[Action]:
    """Forward passes alone, the same on every rank: pp microbatches through a chunk, then through the next chunk."""
    return [
        Action(False, chunk, microbatch)
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + pp, microbatches))
    ]


def order(pp: int, vpp: int, microbatches: int, pp_rank: int) -> list[Action]:
    """1F1B, interleaved where vpp > 1 (then microbatches are a multiple of pp)."""
    forward = forward_order(pp, vpp, microbatches)
    backward = [Action(True, vpp - 1 - action.chunk, action.microbatch) for action in forward]
    behind = pp - pp_rank - 1
    warmup = min(len(forward), behind if vpp == 1 else 2 * behind + (vpp - 1) * pp)
    steady = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *(action for pair in steady for action in pair), *backward[len(forward) - warmup :]]


class Edge(NamedTuple):
    """Whom a message comes from or goes to."""

    pp_rank: int
    tag: int
    """Unique among all messages of a step between two ranks."""
    wraps: bool
    """Between the last pipeline rank and the first."""


def edge(action: Action, pp: int, vpp: int, pp_rank: int, *, outgoing: bool) -> Edge | None:
    """The message that an action needs (or, outgoing, makes); None at the ends of the model."""
    stage = action.chunk * pp + pp_rank
    to_next = outgoing != action.backward
    other = stage + 1 if to_next else stage - 1
    if not 0 <= other < pp * vpp:
        return None
    boundary = min(stage, other)
    tag = (action.microbatch * pp * vpp + boundary) * 2 + action.backward
    return Edge(other % pp, tag, boundary % pp == pp - 1)


class Operation(NamedTuple):
    """One of the things that a rank does in a step."""

    kind: str
    """`post` (ask for a message), `wait` (for it), `compute`, `send`."""
    action: Action
    edge: Edge | None = None
    """Of a message; None to compute."""


def program(actions: Sequence[Action], pp: int, vpp: int, pp_rank: int) -> Iterator[Operation]:
    """Everything that a rank does, one after the other.

    The next message is asked for before the present pass is computed, so that it can arrive meanwhile.
    """
    incoming = [edge(action, pp, vpp, pp_rank, outgoing=False) for action in actions]
    for here, action in enumerate(actions):
        if here == 0 and incoming[here] is not None:
            yield Operation("post", action, incoming[here])
        if incoming[here] is not None:
            yield Operation("wait", action, incoming[here])
        if here + 1 < len(actions) and incoming[here + 1] is not None:
            yield Operation("post", actions[here + 1], incoming[here + 1])
        yield Operation("compute", action)
        outgoing = edge(action, pp, vpp, pp_rank, outgoing=True)
        if outgoing is not None:
            yield Operation("send", action, outgoing)


class Executor:
    """Walks through a program: receives, computes, sends, and keeps what the backward passes need."""

    def __init__(
        self, grid: Grid, forward: Callable[[Action, Payload], Payload], arriving: Callable[[Action], Wires]
    ) -> None:
        """forward(action, taken): nothing is taken on the first stage; the last one gives the loss to go backward from.

        arriving: what comes from another stage for an action: forward a payload, backward the gradients of one.
        """
        self._grid, self._forward, self._arriving = grid, forward, arriving
        self._inputs: dict[tuple[int, int], Payload] = {}
        self._outputs: dict[tuple[int, int], list[GradientEdge | None]] = {}
        self._sent: list[tuple[Work, Tensor]] = []

    def run(self, actions: Sequence[Action], before_backward: Callable[[Action], None] = lambda _: None) -> None:
        layout = self._grid.layout
        posted: dict[Action, list[tuple[Work, Tensor]]] = {}
        received: Payload = ()
        made: Payload = ()
        for kind, action, at in program(actions, layout.pp, layout.vpp, self._grid.pp_rank):
            if kind == "compute":
                if action.backward:
                    before_backward(action)
                made = (self._go_backward if action.backward else self._go_forward)(action, received)
                received = ()
                continue
            assert at is not None, "messages have an edge"
            if kind == "post":
                posted[action] = self._post(action, at)
            elif kind == "wait":
                received = _arrived(posted.pop(action))
            else:
                self._send(action, at, made)
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _go_forward(self, action: Action, taken: Payload) -> Payload:
        if torch.is_grad_enabled():
            for x in _differentiable(taken):
                x.requires_grad_()
        given = self._forward(action, taken)
        if torch.is_grad_enabled():
            # Of the output the backward pass needs its place in the graph alone; its memory goes when it is sent.
            edges = [get_gradient_edge(y) if y.requires_grad else None for y in _differentiable(given)]
            self._inputs[action[1:]], self._outputs[action[1:]] = taken, edges
        return tuple(y.detach() for y in given)

    def _go_backward(self, action: Action, gradients: Payload) -> Payload:
        taken, edges = self._inputs.pop(action[1:]), self._outputs.pop(action[1:])
        gradients = gradients or (torch.ones((), device=self._grid.device),)
        used = [(y, gradient) for y, gradient in zip(edges, gradients, strict=True) if y is not None]
        torch.autograd.backward([y for y, _ in used], [gradient for _, gradient in used])
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in _differentiable(taken))

    def _post(self, action: Action, at: Edge) -> list[tuple[Work, Tensor]]:
        whom, group = self._grid.rank_of_stage(at.pp_rank), self._group(action, at)
        tensors = [
            torch.empty(wire.shape, dtype=wire.dtype, device=self._grid.device) for wire in self._arriving(action)
        ]
        tags = _tags(at, len(tensors))
        return [(comm.receive(tensor, whom, group, tag), tensor) for tensor, tag in zip(tensors, tags, strict=True)]

    def _send(self, action: Action, at: Edge, made: Payload) -> None:
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        whom, group = self._grid.rank_of_stage(at.pp_rank), self._group(action, at)
        for each, tag in zip(made, _tags(at, len(made)), strict=True):
            tensor = each.contiguous()
            self._sent.append((comm.send(tensor, whom, group, tag), tensor))

    def _group(self, action: Action, at: Edge) -> comm.Group:
        return self._grid.channels[channel(action, at)]


def _arrived(posted: list[tuple[Work, Tensor]]) -> Payload:
    for work, _ in posted:
        work.wait()
    return tuple(tensor for _, tensor in posted)


def _differentiable(payload: Payload) -> list[Tensor]:
    """Those that gradients come back for, as Wire.has_gradient says of shapes."""
    return [tensor for tensor in payload if tensor.is_floating_point()]


def _tags(at: Edge, tensors: int) -> range:
    """Of the tensors of one message."""
    assert tensors <= MOST_TENSORS, "tags leave no room for more"
    return range(at.tag * MOST_TENSORS, at.tag * MOST_TENSORS + tensors)


def channel(action: Action, at: Edge) -> Channel:
    """Of a message; all that pass through one go in one direction, in the order in which they are asked for."""
    return Channel(action.backward, at.wraps)


def last_backward(actions: Sequence[Action]) -> set[Action]:
    """Each chunk's last backward pass of a step: what completes its gradients."""
    return set({action.chunk: action for action in actions if action.backward}.values())
