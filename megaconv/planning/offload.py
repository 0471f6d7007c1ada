"""The time that a GPU waits for copies of offloaded activations (--cpu-offloading-num-layers).

Copies run one after another beside the layers, in the order of megatron_lite/models/offload.py:

    forward     a layer's copy starts with the layer, and ends no earlier than it. Layer n frees the activations of layer
                n - 2, so it waits until they are copied.
    backward    a layer's copy back starts with the backward pass of the layer behind it. The last two layers of the model
                never left the GPU.

Only the time that no computation hides is counted.
"""

from collections.abc import Sequence

from megaconv.planning.activations import AT_ONCE, layer_elements
from megaconv.planning.gpus import Gpu
from megaconv.planning.rates import LINKS
from megaconv.planning.run import Run
from megaconv.planning.step_time import BACKWARD, FORWARD


def copy_seconds(run: Run, gpu: Gpu) -> list[float]:
    """Return the seconds in which each offloaded layer's activations of a microbatch cross the link to main memory."""
    speed = gpu.host * LINKS
    layers = run.config.layers[: run.offloaded]
    return [layer_elements(run, kind) * run.tokens * run.itemsize / speed for kind in layers]


def waiting_seconds(layers: Sequence[float], head: float, copies: Sequence[float]) -> float:
    """Return the seconds that a microbatch's passes wait for copies.

    layers: seconds of each layer, forward and backward. head: those of the head. copies: those of the copies of the
    first layers in one direction, as copy_seconds returns them.
    """
    if not copies:
        return 0.0
    now, copied = _forward(layers, copies)
    now = _backward(layers, copies, now + head, copied)
    return max(0.0, now - sum(layers) - head)


def _forward(layers: Sequence[float], copies: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the forward pass and of its copies."""
    now = 0.0
    ends = list[float]()
    for number, seconds in enumerate(layers):
        freed = number - AT_ONCE
        if 0 <= freed < len(copies):
            now = max(now, ends[freed])
        start, now = now, now + FORWARD * seconds
        if number < len(copies):
            free = max(start, ends[-1] if ends else 0.0)
            ends.append(max(free + copies[number], now))
    return now, ends[-1]


def _backward(layers: Sequence[float], copies: Sequence[float], now: float, copied: float) -> float:
    """Return the end of the backward pass. now: its start. copied: the end of the copies to main memory."""
    # The last layers of the model, and all that are not offloaded, are still on the GPU.
    returning = min(len(copies), len(layers) - AT_ONCE)
    returned = 0.0
    for number in range(len(layers) - 1, -1, -1):
        now = max(now, returned)
        before = number - 1
        if 0 <= before < returning:
            copied = returned = max(now, copied) + copies[before]
        now += BACKWARD * layers[number]
    return now
