"""Layers without an indexer of their own: they attend to the positions that an earlier layer's indexer selected.

"indexer_types": ["full", "shared", "shared", "full", ...]
"""

from collections.abc import Callable
from dataclasses import replace

from megaconv.errors import CorruptCheckpoint, NotExpressible
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

_TYPES, _PATTERN = "indexer_types", "index_topk_pattern"
_FREQUENCY, _OFFSET = "index_topk_freq", "index_skip_topk_offset"
_WORDS = {"full": False, "shared": True}
_LETTERS = {"F": "full", "S": "shared"}


def indexer_types(usual: Callable[[Raw, int], list[str]], *older: str) -> Keys:
    """The key with a word for each layer.

    usual: a function of config.json and the number of layers that gives the words if the key is missing.
    older: the further keys that this function reads.
    """

    def read(raw: Raw) -> Fields:
        layers = need_size(raw, "num_hidden_layers")
        stated = raw.get(_TYPES)
        words = usual(raw, layers) if stated is None else stated
        require_each_layer(_TYPES, words, layers)
        for word in words:
            if word not in _WORDS:
                raise NotExpressible(
                    f"{CONFIG_NAME}: {_TYPES} has {word!r}, which is not supported; expected {' or '.join(_WORDS)}"
                )
        return {"layers.shares_index": one_or_each(tuple(_WORDS[word] for word in words))}

    return Keys((_TYPES, *older), read, _write)


def indexers_where_owned(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, with those of indexers only for the layers that have one."""
    return tuple(
        replace(row, when="own_index")
        if row.stage == "layer" and ".indexer." in row.canonical
        else row
        for row in rows
    )


def _write(config: ModelConfig) -> Raw:
    return {_TYPES: ["shared" if kind.shares_index else "full" for kind in config.layers]}


def types_by_pattern() -> Keys:
    """The key as transformers' classes of GLM read it. Without it, a pattern of letters or a frequency gives the words."""
    return indexer_types(_by_pattern, _PATTERN, _FREQUENCY, _OFFSET)


def _by_pattern(raw: Raw, layers: int) -> list[str]:
    pattern = raw.get(_PATTERN)
    if pattern is None:
        return _by_frequency(raw, layers)
    return [_LETTERS.get(each, each) for each in pattern] if isinstance(pattern, str) else pattern


def _by_frequency(raw: Raw, layers: int) -> list[str]:
    """The first layers have an indexer, and so has one of each `index_topk_freq` layers after them."""
    step, offset = raw.get(_FREQUENCY, 1), raw.get(_OFFSET, 2)
    if type(step) is not int or type(offset) is not int:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_FREQUENCY} and {_OFFSET} should be numbers, found {step!r:.40} and {offset!r:.40}"
        )
    step = max(step, 1)
    after = (max(layer - offset + 1, 0) for layer in range(layers))
    return ["shared" if number % step else "full" for number in after]
