"""The time of passes without gradients, such as those of a reference model."""

from dataclasses import replace

from megaconv.model.layout import Chunk
from megaconv.planning.layer_costs import (
    Machine,
    forward_seconds,
    head_forward_seconds,
    message_seconds,
)
from megaconv.planning.parameters import Parameters
from megaconv.planning.recomputation import KEEP_ALL
from megaconv.planning.run import Run


def forward_time(run: Run, machine: Machine) -> float:
    """Return the seconds in which all microbatches of a step pass through the model once, without adapters.

    Raises LayoutError if the model can't be sharded so.
    """
    plain = replace(run, frozen=False, adapters=(), recompute=KEEP_ALL)
    layout = run.layout
    parameters = Parameters.of(run.config, layout.tp, layout.ep, layout.etp, run.vocab_divisor)
    by_rank = [0.0] * layout.pp
    for chunk in layout.chunks():
        by_rank[chunk.pp_rank] += _chunk_seconds(plain, chunk, parameters, machine)
    busiest = max(by_rank)
    others = (sum(by_rank) - busiest) / layout.vpp
    messages = message_seconds(run, machine.gpu) if layout.pp > 1 else 0.0
    return run.microbatches * (busiest + messages) + others + (layout.pp - 1) * messages


def _chunk_seconds(run: Run, chunk: Chunk, parameters: Parameters, machine: Machine) -> float:
    """Return the seconds of a microbatch in a chunk."""
    found = head_forward_seconds(run, machine) if chunk.is_last else 0.0
    for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers):
        kind, share = run.config.layers[layer], parameters.layer(layer)
        found += forward_seconds(run, kind, share, machine)
    return found
