"""Windows of attention: one for all layers, or one for each layer, in the keys of several architectures."""

from collections.abc import Callable
from typing import Any

from megaconv.families.parts.computable import require_count
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_size,
)
from megaconv.families.parts.layer_mixers import LAYER_TYPES, layer_words
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each, per_layer


def window(default: int | None) -> Keys:
    """One window for all layers, or none."""
    return Keys(
        ("sliding_window",),
        lambda raw: {"layers.window": raw.get("sliding_window", default) or None},
        lambda config: {"sliding_window": config.window},
    )


def layer_types(config: ModelConfig) -> list[str]:
    """transformers' name of each layer's attention."""
    return [
        "full_attention" if kind.window is None else "sliding_attention" for kind in config.layers
    ]


def windowed_layers(raw: Raw, otherwise: list[str]) -> tuple[int, ...]:
    """The layers with a window, by layer_types. otherwise: the layer_types if the key is missing."""
    layers = need_size(raw, "num_hidden_layers")
    kinds = layer_words(raw, ("sliding_attention", "full_attention"), layers, lambda: otherwise)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def windows_on(raw: Raw, layers: tuple[int, ...], size_of_window: int | None) -> Fields:
    """The field layers.window, with a window on these layers."""
    return {
        "layers.window": per_layer(
            layers, need_size(raw, "num_hidden_layers"), size_of_window, None
        )
    }


def windows_by_layer(
    default: int, *, full_every: int | None, full_first: bool = False, pattern: tuple[str, ...] = ()
) -> Keys:
    """A window for each layer. default, full_every: without layer_types, every full_every-th layer has no window, and
    the others have this size. None: all layers have this size.

    full_first: True if the first of full_every layers has no window, False if the last of them has none.
    pattern: further keys, the first of which gives full_every if layer_types is missing.
    """

    def read(raw: Raw) -> Fields:
        given = [key for key in pattern if raw.get(key) is not None]
        every = need_size(raw, given[0]) if given else full_every
        otherwise = windows_but_every(every, raw, place=1 if full_first else 0)
        windowed = windowed_layers(raw, otherwise)
        return windows_on(raw, windowed, raw.get("sliding_window", default) or None)

    def write(config: ModelConfig) -> Raw:
        # Write a size even if no layer has a window: transformers' models need it to make a mask.
        return {"sliding_window": config.window or default, "layer_types": layer_types(config)}

    return Keys(("sliding_window", "layer_types", *pattern), read, write)


def windows_by_words(
    words: tuple[str, str],
    key: str,
    usual: Callable[[Raw, int], list[str]],
    *,
    layers: int,
    window: int | None = None,
    others: tuple[str, ...] = (),
) -> Keys:
    """A window in the layers that layer_types names. Other layers have none, whatever `key` says.

    words: of layers without a window and with one. key: the key of the window. usual: (config.json, number of layers) -> the
    words if layer_types is missing. layers, window: the values if num_hidden_layers and `key` are missing. others: further keys
    that `usual` reads.
    """
    full, windowed = words

    def read(raw: Raw) -> Fields:
        count = need_size(raw, "num_hidden_layers", layers)
        listed = layer_words(raw, words, count, lambda: usual(raw, count))
        size_of_window = need_size(raw, key, window) if windowed in listed else None
        each = tuple(size_of_window if word == windowed else None for word in listed)
        return {"layers.window": one_or_each(each)}

    def write(config: ModelConfig) -> Raw:
        listed = [full if kind.window is None else windowed for kind in config.layers]
        return {LAYER_TYPES: listed, key: config.window or window}

    return Keys((LAYER_TYPES, key, *others), read, write)


def window_or_layers(default: int) -> Keys:
    """One window for all layers, or none; with layer_types, a window on the layers that it names.

    transformers' AutoConfig reads a Mistral with layer_types as a Ministral.
    """
    one, each = window(default), windows_by_layer(default, full_every=None)

    def read(raw: Raw) -> Fields:
        return each.read(raw) if "layer_types" in raw else one.read(raw)

    def write(config: ModelConfig) -> Raw:
        windowed = len(config.layers_with("window"))
        return one.write(config) if windowed in (0, config.layer_count) else each.write(config)

    return Keys(each.names, read, write)


def rotating_windows(windows: Keys) -> Keys:
    """The keys of windows, for models in which rope rotates the layers with a window only.

    windows: the keys that give layers.window.
    """

    def read(raw: Raw) -> Fields:
        found: Any = windows.read(raw)["layers.window"]
        each = found if isinstance(found, tuple) else (found,)
        return {
            "layers.window": found,
            "layers.rotates": one_or_each(tuple(size is not None for size in each)),
        }

    return Keys(windows.names, read, windows.write)


def windows_but_every(step: int | None, raw: Raw, *, place: int = 0) -> list[str]:
    """The layer_types of a model in which every step-th layer has no window; None: all layers have one.

    place: the remainder of the number of such a layer, counted from 1, divided by step.
    """
    layers = need_size(raw, "num_hidden_layers")
    if step is None:
        return ["sliding_attention"] * layers
    return [
        "full_attention" if (layer + 1) % step == place % step else "sliding_attention"
        for layer in range(layers)
    ]


def qwen_windows(every_layer: Callable[[Raw], list[str]]) -> Keys:
    """Qwen's windows, which apply only if use_sliding_window is true. every_layer: the layer_types if that key is
    missing.

    The layers are written one by one, which old and new transformers both read.
    """

    def read(raw: Raw) -> Fields:
        size = raw.get("sliding_window", 4096)
        if not raw.get("use_sliding_window") or not size:
            return {}
        return windows_on(raw, windowed_layers(raw, every_layer(raw)), size)

    def write(config: ModelConfig) -> Raw:
        windowed = config.layers_with("window")
        return {
            "use_sliding_window": bool(windowed),
            "sliding_window": config.window,
            "max_window_layers": windowed[0] if windowed else config.layer_count,
            "layer_types": layer_types(config),
        }

    return Keys(
        ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write
    )


def windows_at_the_end(raw: Raw, default: int) -> list[str]:
    """The layer_types of a model in which the layers from max_window_layers on have a window. default: the value of a
    missing key."""
    layers = need_size(raw, "num_hidden_layers")
    first = require_count(CONFIG_NAME, raw, "max_window_layers", default)
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


QWEN_WINDOWS = qwen_windows(lambda raw: windows_at_the_end(raw, 28))
"""Windows of Qwen 2 and 3: without layer_types, the layers from max_window_layers on have them."""
