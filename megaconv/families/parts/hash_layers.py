"""Layers that choose a token's experts by a stored table of the vocabulary, not by the router's scores (DeepSeek V4).

The router's scores still give the weights of the chosen experts. Source: DeepseekV4HashRouter of transformers 5.23.
"""

from typing import Any

from megaconv.errors import UnknownFamily
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_size,
    require_each_layer,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row

HASH_TABLE = Row(
    "layers.{l}.mlp.router.experts_of_tokens", ("vocab experts_per_token",), when="moe hashed",
    hf="layers.{l}.ffn.gate.tid2eid",
    hf_stacked="model.layers.{l}.mlp.gate.tid2eid",
)  # fmt: skip
"""The numbers of each token's experts, as integers."""

_TYPES, _FIRST = "mlp_layer_types", "num_hash_layers"
_WORDS = {"hash_moe": True, "moe": False}


def hash_layers(first: int) -> Keys:
    """mlp_layer_types, or the number of first layers with a table in published files. first: the default."""

    def read(raw: Raw) -> Fields:
        layers = need_size(raw, "num_hidden_layers")
        words = raw.get(_TYPES) or _of_first(_number(raw, first), layers)
        require_each_layer(_TYPES, words, layers)
        for word in words:
            if word not in _WORDS:
                raise UnknownFamily(
                    f"{CONFIG_NAME}: {_TYPES} has {word!r}, which is not supported; expected {' or '.join(_WORDS)}"
                )
        return {"layers.hashed": one_or_each(tuple(_WORDS[word] for word in words))}

    return Keys((_TYPES, _FIRST), read, _write)


def _number(raw: Raw, first: int) -> int:
    given: Any = raw.get(_FIRST)
    if given is None:
        return first
    return given if given == 0 else need_size(raw, _FIRST)


def _of_first(first: int, layers: int) -> list[str]:
    return ["hash_moe" if layer < first else "moe" for layer in range(layers)]


def _write(config: ModelConfig) -> Raw:
    """The words for all layers, and the number of first layers if no other layer has a table."""
    words = ["hash_moe" if kind.hashed else "moe" for kind in config.layers]
    first = words.count("hash_moe")
    published = {_FIRST: first} if words == _of_first(first, len(words)) else {}
    return {_TYPES: words, **published}
