"""Hybrid patterns: one symbol a layer, of models each of whose layers is a mixer or an MLP alone.

    M a Mamba 2        * attention        - an MLP        E experts

config.json (hybrid_override_pattern) and Megatron's arguments have the same. Source: NemotronHConfig of transformers 5;
mamba_hybrid_layer_allocation.py of megatron-core 0.16.1.
"""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_KINDS = {"M": ("mamba", "none"), "*": ("attention", "none"), "-": ("none", "dense"), "E": ("none", "experts")}
"""(mixer, MLP) of a layer."""
_SYMBOLS = {kind: symbol for symbol, kind in _KINDS.items()}
SYMBOLS = {"M": "Mamba 2", "*": "attention", "-": "MLP", "E": "MoE"}
"""For people."""


def pattern_of(config: ModelConfig) -> str:
    """Raises NotExpressible, naming it, for a layer that has no symbol."""
    for layer, kind in enumerate(config.layers):
        if (kind.mixer, kind.mlp) not in _SYMBOLS:
            raise NotExpressible(
                f"the model's layers.mixer and layers.mlp of layer {layer} are {kind.mixer!r} and {kind.mlp!r}, for which hybrid patterns "
                "have no symbol"
            )
    return "".join(_SYMBOLS[kind.mixer, kind.mlp] for kind in config.layers)


def layer_fields(pattern: str, where: str) -> dict[str, Any]:
    """The fields of these layers. Raises NotExpressible, naming where and the symbol, for one that is not known."""
    others = [symbol for symbol in pattern if symbol not in _KINDS]
    if others or not pattern:
        found = f"has {others[0]!r}" if others else "is empty"
        raise NotExpressible(f"{where} {found}; supported: {', '.join(_KINDS)}")
    mixers, mlps = zip(*(_KINDS[symbol] for symbol in pattern), strict=True)
    return {"layers.count": len(pattern), "layers.mixer": one_or_each(mixers), "layers.mlp": one_or_each(mlps)}
