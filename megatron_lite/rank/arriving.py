"""The tensors that a rank receives from other pipeline stages."""

from collections.abc import Callable, Sequence

from megaconv.planning.pipeline_order import Action
from megatron_lite.models.batch import Lengths, Microbatch
from megatron_lite.models.network_interface import Network
from megatron_lite.parallel.payload import Wires, with_gradient


def arriving_tensors(
    chunks: Sequence[Network], batch: Microbatch, cp: int
) -> Callable[[Action], Wires]:
    """Return a function: action -> the tensors that it receives from another stage, for microbatches of this shape."""
    rows, length = batch.tokens.shape
    source_rows, source_length = (0, 0) if batch.source is None else batch.source.shape
    lengths = Lengths(rows, length // cp, source_length, source_rows)

    def arriving(action: Action) -> Wires:
        chunk = chunks[action.chunk]
        if action.backward:
            return with_gradient(chunk.gives(lengths))
        return chunk.takes(lengths)

    return arriving
