"""Dropout without a random state: seed, step, microbatch and place in the model determine the dropped elements.

A step drops the same elements in every layout (of equal microbatches). Recomputation drops the same elements again, and
a checkpoint has no state to store. There are two exceptions. For attention weights, each tensor rank draws for its own
heads, and so does a context rank that has some heads of all tokens. For the adapters of experts, each rank draws for the
rows of its own experts.
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
"""The first place number of adapters."""

_SOURCE = 1
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return one 63-bit seed from several numbers (SplitMix64, chained)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class At:
    """A place in the model: a layer, and one of its places.

    This is a class so that torch.compile doesn't inspect the layer's number; it would compile each layer anew.
    """

    def __init__(self, layer: int, place: int) -> None:
        self.layer, self.place = layer, place


class Seed:
    """The seed of one microbatch's pass.

    It is mutable on purpose: torch.compile adds no guards for values that it never reads.
    """

    def __init__(self, *numbers: int, context: ContextGroup | None = None) -> None:
        """context: the ranks that share each sequence."""
        self.value, self._context = mix(*numbers), context

    def of_source(self) -> "Seed":
        """Return a different seed for an encoder, because its layers count from 0 like the decoder's."""
        return Seed(self.value, _SOURCE, context=self._context)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def drop(
        self,
        x: Tensor,
        probability: float,
        at: At,
        ranks: TensorGroup,
        columns: TensorGroup | None = None,
    ) -> Tensor:
        """x [sequence (/ cp, / tp), batch, width] with some elements 0 and the others scaled up.

        columns: the ranks that share the width; None: each rank has the whole width.
        Every rank draws for the whole sequence and width. So ranks agree on the mask, whether they share them or not.
        """
        generator = torch.Generator(x.device).manual_seed(mix(self.value, at.layer, at.place))
        context = self._context
        length = (
            x.shape[0]
            * (ranks.size if ranks.sequence else 1)
            * (context.size if context is not None else 1)
        )
        *batch, width = x.shape[1:]
        first, parts = (0, 1) if columns is None else (columns.rank * width, columns.size)
        kept = x.new_empty(length, *batch, width * parts)
        kept.bernoulli_(1 - probability, generator=generator)
        kept = kept.narrow(-1, first, width)
        own = kept if context is None else context.own_part(kept, 0)
        return x * (ranks.own_part(own) / (1 - probability))

    def _heads_of(self, ranks: TensorGroup) -> int:
        """Return the index of this rank's heads. Context ranks that exchange heads for tokens count as tensor ranks."""
        context = self._context
        return ranks.rank if context is None else ranks.rank * context.size + context.rank

    @contextmanager
    def for_attention(self, at: At, ranks: TensorGroup, device: torch.device) -> Iterator[None]:
        """Seed torch's generator, which attention uses, for this place. The generator's state is restored at the end."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(mix(self.value, at.layer, at.place, self._heads_of(ranks)))
            yield
