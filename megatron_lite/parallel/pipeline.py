"""Pipeline parallelism: executes a rank's passes in the order from pipeline_order.py."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaconv.planning.pipeline_order import Action
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Channel, Grid
from megatron_lite.parallel.payload import MOST_TENSORS, Payload, Wires
from megatron_lite.parallel.pipeline_order import Edge, program


class Executor:
    """Executes a program: receives, computes, sends, and keeps the tensors that backward passes need."""

    def __init__(
        self,
        grid: Grid,
        forward: Callable[[Action, Payload], Payload],
        arriving: Callable[[Action], Wires],
        region: Callable[[Action], AbstractContextManager[Any]],
    ) -> None:
        """Create an executor.

        forward(action, payload): computes a pass. The payload is empty on the first stage. The last stage returns the
        loss.
        arriving: gives the tensors that an action receives from another stage: a payload, or its gradients in a
        backward pass.
        region(action): gives the context in which the pass is computed.
        """
        self._grid, self._forward, self._arriving = grid, forward, arriving
        self._region = region
        self._inputs: dict[tuple[int, int], Payload] = {}
        self._outputs: dict[tuple[int, int], list[GradientEdge | None]] = {}
        self._sent: list[tuple[comm.Call, Tensor]] = []

    def run(
        self, actions: Sequence[Action], before_backward: Callable[[Action], None] = lambda _: None
    ) -> None:
        """Execute the passes in this order. before_backward: called before each backward pass."""
        layout = self._grid.layout
        posted: dict[Action, list[tuple[comm.Call, Tensor]]] = {}
        received: Payload = ()
        made: Payload = ()
        for kind, action, at in program(actions, layout.pp, layout.vpp, self._grid.pp_rank):
            if kind == "compute":
                if action.backward:
                    before_backward(action)
                compute = self._go_backward if action.backward else self._go_forward
                with self._region(action):
                    made = compute(action, received)
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
            # The backward pass needs only the output's edge in the graph. The output is freed when it is sent.
            edges = [
                get_gradient_edge(y) if y.requires_grad else None for y in _differentiable(given)
            ]
            self._inputs[action[1:]], self._outputs[action[1:]] = taken, edges
        return tuple(y.detach() for y in given)

    def _go_backward(self, action: Action, gradients: Payload) -> Payload:
        taken, edges = self._inputs.pop(action[1:]), self._outputs.pop(action[1:])
        gradients = gradients or (torch.ones((), device=self._grid.device),)
        used = [
            (y, gradient) for y, gradient in zip(edges, gradients, strict=True) if y is not None
        ]
        torch.autograd.backward([y for y, _ in used], [gradient for _, gradient in used])
        return tuple(
            torch.zeros_like(x) if x.grad is None else x.grad for x in _differentiable(taken)
        )

    def _post(self, action: Action, at: Edge) -> list[tuple[comm.Call, Tensor]]:
        sender = self._grid.rank_of_stage(at.pp_rank)
        group = self._group(action, at)
        device = self._grid.device
        wires = self._arriving(action)
        posted = []
        for wire, tag in zip(wires, _tags(at, len(wires)), strict=True):
            tensor = torch.empty(wire.shape, dtype=wire.dtype, device=device)
            call = comm.receive(tensor, sender, group, tag)
            posted.append((call, tensor))
        return posted

    def _send(self, action: Action, at: Edge, made: Payload) -> None:
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        whom, group = self._grid.rank_of_stage(at.pp_rank), self._group(action, at)
        for each, tag in zip(made, _tags(at, len(made)), strict=True):
            tensor = each.contiguous()
            self._sent.append((comm.send(tensor, whom, group, tag), tensor))

    def _group(self, action: Action, at: Edge) -> comm.Group:
        return self._grid.channels[channel(action, at)]


def _arrived(posted: list[tuple[comm.Call, Tensor]]) -> Payload:
    for work, _ in posted:
        work.wait()
    return tuple(tensor for _, tensor in posted)


def _differentiable(payload: Payload) -> list[Tensor]:
    """Return the tensors that have gradients, by the rule of Wire.has_gradient."""
    return [tensor for tensor in payload if tensor.is_floating_point()]


def _tags(at: Edge, tensors: int) -> range:
    """Return the tags of the tensors in one message."""
    assert tensors <= MOST_TENSORS, "tags leave no room for more"
    return range(at.tag * MOST_TENSORS, at.tag * MOST_TENSORS + tensors)


def channel(action: Action, at: Edge) -> Channel:
    """Return the channel of a message. All its messages have one direction and arrive in the order of the requests."""
    return Channel(action.backward, at.wraps)
