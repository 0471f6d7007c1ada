"""Hybrid patterns: one symbol per layer, for models in which each layer is either a mixer or an MLP.

    M a Mamba 2        * attention        - an MLP        E experts

config.json (hybrid_override_pattern) and Megatron's arguments use the same symbols. Source: NemotronHConfig of
transformers 5; mamba_hybrid_layer_allocation.py of megatron-core 0.16.1.
"""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_KINDS = {
    "M": ("mamba", "none"),
    "*": ("attention", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
"""Symbol -> (mixer, MLP) of the layer."""
_SYMBOLS = {kind: symbol for symbol, kind in _KINDS.items()}
SYMBOLS = {"M": "Mamba 2", "*": "attention", "-": "MLP", "E": "MoE"}
"""Symbol -> name of the layer, for people."""


def has_pattern(config: ModelConfig) -> bool:
    """True if each layer has a symbol: none has both a mixer and an MLP, or a shared block."""
    return all((kind.mixer, kind.mlp) in _SYMBOLS and not kind.block for kind in config.layers)


def pattern_of(config: ModelConfig) -> str:
    """The hybrid pattern of a model. Raises NotExpressible, which names the layer, for a layer without a symbol."""
    for layer, kind in enumerate(config.layers):
        if (kind.mixer, kind.mlp) not in _SYMBOLS:
            raise NotExpressible(
                f"the model's layers.mixer and layers.mlp of layer {layer} are {kind.mixer!r} and {kind.mlp!r}, for which hybrid patterns "
                "have no symbol"
            )
    return "".join(_SYMBOLS[kind.mixer, kind.mlp] for kind in config.layers)


def layer_fields(pattern: str, where: str) -> dict[str, Any]:
    """The fields of the layers of a pattern. Raises NotExpressible, which names `where` and the symbol, for an unknown
    symbol."""
    others = [symbol for symbol in pattern if symbol not in _KINDS]
    if others or not pattern:
        found = f"has {others[0]!r}" if others else "is empty"
        raise NotExpressible(f"{where} {found}; supported: {', '.join(_KINDS)}")
    mixers, mlps = zip(*(_KINDS[symbol] for symbol in pattern), strict=True)
    return {
        "layers.count": len(pattern),
        "layers.mixer": one_or_each(mixers),
        "layers.mlp": one_or_each(mlps),
    }
