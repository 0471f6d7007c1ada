"""The tensors that pass from layer to layer beside the hidden states: inputs of each layer, and shared keys and values.

    inputs     a part of a second embedding for each layer that follows            (Gemma 4 E2B and E4B)
    keys       the keys and values of the last layers that have their own, for the layers after them

They are part of the state between layers, so that activation recomputation and pipeline stages hand them on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.cache import Cache

Kind = bool
"""Whether a layer has a window. Layers of one kind share keys and values."""


class KeysAndValues(NamedTuple):
    """The keys and values of the tokens of a pass, [sequence, batch, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class State(NamedTuple):
    """The tensors between two layers."""

    hidden: Tensor
    """[sequence (/ tp), batch, hidden]."""
    inputs: tuple[Tensor, ...]
    """Of each layer that follows, [sequence (/ tp), batch, width]; empty in models without such inputs."""
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


def kind_of(config: ModelConfig, layer: int) -> Kind:
    """Return the kind of a layer."""
    return config.layers[layer].window is not None


def sources(config: ModelConfig) -> Mapping[Kind, int]:
    """Return the layer whose keys and values later layers share, by kind; empty if no layers share any."""
    sharing = [layer for layer, kind in enumerate(config.layers) if kind.shares_kv]
    kinds = {kind_of(config, layer) for layer in sharing}
    own = range(min(sharing, default=0))
    # A later layer of a kind replaces an earlier one.
    return {kind_of(config, layer): layer for layer in own if kind_of(config, layer) in kinds}


def kept_before(config: ModelConfig, layer: int) -> tuple[Kind, ...]:
    """Return the kinds whose shared keys and values exist before a layer, and that it or a later layer needs."""
    needed = {kind.window is not None for kind in config.layers[layer:] if kind.shares_kv}
    return tuple(
        kind for kind, source in sources(config).items() if kind in needed and source < layer
    )


def caches_keys(config: ModelConfig, layer: int, first: int) -> bool:
    """Return whether a layer has its own part of the cache. first: the first layer of its stage.

    Layers that share keys and values use the part of an earlier layer of the stage, if there is one.
    """
    if not config.layers[layer].shares_kv:
        return True
    kind = kind_of(config, layer)
    earlier = range(max(first, sources(config)[kind]), layer)
    return all(kind_of(config, each) != kind for each in earlier)
