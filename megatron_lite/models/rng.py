"""Dropout without a random state: what is dropped follows from a seed, the step, the microbatch and the place in the model.

So the same step drops the same at every layout (of equal microbatches), computing a layer again drops the same again, and
a checkpoint has nothing to keep. Attention weights are the exception: each tensor rank, or context rank that has some heads of all
tokens, draws for its own heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.tensor import TensorGroup

ATTENTION, AFTER_ATTENTION, AFTER_MLP, EMBEDDING, AFTER_CROSS_ATTENTION, POOLED = range(6)
"""Places in a layer."""
LORA = 1 << 16
"""From here on those of adapters."""

_SOURCE = 1
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 63-bit seed out of several numbers (SplitMix64, chained)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class At:
    """A place in the model: a layer, and which of its places. A class of its own so that torch.compile, which would compile each
    layer anew for its number, never looks into it.
    """

    def __init__(self, layer: int, place: int) -> None:
        self.layer, self.place = layer, place


class Seed:
    """Of one pass of one microbatch. Mutable on purpose: torch.compile doesn't guard what it never reads."""

    def __init__(self, *numbers: int, context: ContextGroup | None = None) -> None:
        """context: the ranks that share each sequence."""
        self.value, self._context = mix(*numbers), context

    def of_source(self) -> "Seed":
        """Another one, for an encoder, whose layers are counted from 0 as the decoder's are."""
        return Seed(self.value, _SOURCE, context=self._context)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def drop(self, x: Tensor, probability: float, at: At, ranks: TensorGroup) -> Tensor:
        """x [sequence (/ cp, / tp), batch, width] with some elements 0 and the others scaled up.

        Drawn for the whole sequence on every rank, so that ranks agree on it whether they share it or not.
        """
        generator = torch.Generator(x.device).manual_seed(mix(self.value, at.layer, at.place))
        context = self._context
        length = x.shape[0] * (ranks.size if ranks.sequence else 1) * (context.size if context is not None else 1)
        kept = x.new_empty(length, *x.shape[1:]).bernoulli_(1 - probability, generator=generator)
        own = kept if context is None else context.own_part(kept, 0)
        return x * (ranks.own_part(own) / (1 - probability))

    def _heads_of(self, ranks: TensorGroup) -> int:
        """Which heads of all this rank attends with, where context ranks take heads for tokens: counted as if they were tensor ranks."""
        context = self._context
        return ranks.rank if context is None else ranks.rank * context.size + context.rank

    @contextmanager
    def for_attention(self, at: At, ranks: TensorGroup, device: torch.device) -> Iterator[None]:
        """torch's own generator, from which attention draws, seeded for this place, and afterwards as it was."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(mix(self.value, at.layer, at.place, self._heads_of(ranks)))
            yield
