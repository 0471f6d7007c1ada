"""Keys with a word for the mixer of each layer, such as `layer_types` of hybrids."""

from collections.abc import Callable, Collection, Mapping, Sequence

from megaconv.errors import NotExpressible
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

LAYER_TYPES = "layer_types"


def layer_words(
    raw: Raw, known: Collection[str], layers: int, otherwise: Callable[[], Sequence[str]]
) -> Sequence[str]:
    """layer_types, a word for each layer. otherwise: makes the words if the key is missing.

    Raises NotExpressible for a word that isn't known, CorruptCheckpoint for another number of words than layers.
    """
    listed = raw.get(LAYER_TYPES) or otherwise()
    for word in listed:
        if word not in known:
            raise NotExpressible(
                f"{CONFIG_NAME}: {LAYER_TYPES} has {word!r}, which this architecture doesn't support"
            )
    require_each_layer(LAYER_TYPES, listed, layers)
    return listed


def layer_mixers(
    words: Mapping[str, str],
    otherwise: Callable[[Raw, int], Sequence[str]],
    *others: str,
    layers: int | None = None,
) -> Keys:
    """layer_types: a word for each layer's mixer.

    words: word -> mixer. If several words mean one mixer, the first one is written. otherwise: (config.json, number of
    layers) -> the words if the key is missing. others: further keys that `otherwise` reads. layers: the number of layers
    if config.json has none; None if it must have one.
    """
    written: dict[str, str] = {}
    for word, mixer in words.items():
        written.setdefault(mixer, word)

    def read(raw: Raw) -> Fields:
        count = need_size(raw, "num_hidden_layers", layers)
        listed = layer_words(raw, words, count, lambda: otherwise(raw, count))
        return {"layers.mixer": one_or_each(tuple(words[word] for word in listed))}

    def write(config: ModelConfig) -> Raw:
        for kind in config.layers:
            if kind.mixer not in written:
                raise NotExpressible(
                    f"the model's layers.mixer has {kind.mixer!r}, which {LAYER_TYPES} can't represent"
                )
        return {LAYER_TYPES: [written[kind.mixer] for kind in config.layers]}

    return Keys((LAYER_TYPES, *others), read, write)
