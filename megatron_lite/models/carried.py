"""The tensors that pass from layer to layer beside the hidden states: inputs of each layer, and shared keys and values.

    inputs     a part of a second embedding for each layer that follows            (Gemma 4 E2B and E4B)
    keys       the keys and values of the last layers that have their own, for the layers after them

They are part of the state between layers, so that activation recomputation and pipeline stages hand them on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megaconv.planning.carried import Kind
from megatron_lite.models.cache import Cache


class KeysAndValues(NamedTuple):
    """The keys and values of the tokens of a pass, [sequence, batch, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class State(NamedTuple):
    """The tensors between two layers."""

    hidden: Tensor
    """[sequence (/ tp), batch, hidden]."""
    inputs: tuple[Tensor, ...]
    """A tensor [sequence (/ tp), batch, width] for each layer that follows; empty in models without such inputs."""
    kept: Mapping[Kind, KeysAndValues]
    """Shared keys and values, from the layer that makes them on."""


@dataclass
class Carried:
    """The part of a state that one layer reads and writes beside its hidden states."""

    input: Tensor | None
    """The layer's own input."""
    kept: dict[Kind, KeysAndValues]
    cached: dict[Kind, KeysAndValues]
    """The shared keys and values of all earlier tokens too, in generation. All layers of a stage have the same dictionary."""

    def of_all_tokens(self, kind: Kind, layer: int, cache: Cache | None) -> KeysAndValues:
        """Return the shared keys and values, in generation those of earlier tokens too.

        layer: the one that asks. The first one of a stage adds new keys and values to its part of the cache.
        """
        if cache is None:
            return self.kept[kind]
        if kind not in self.cached:
            self.cached[kind] = KeysAndValues(*cache.append(layer, *self.kept[kind]))
        return self.cached[kind]
