"""--layers: a model of some of a model's layers, in any order, also several times."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.tensor import LazyTensor
from formats.wording import counted, listing
from megaconv.engine.derived import derived_header, require_language_model
from megaconv.errors import (
    CorruptCheckpoint,
    NotExpressible,
    UnsupportedInput,
    UsageError,
)
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key, Source
from megaconv.model.layout import layout_for
from megaconv.model.table import canonical_shapes

_LAYERS = "layers."
"""The beginning of the names of a layer's tensors."""


@dataclass(frozen=True)
class ChosenLayers:
    """The weights of a model's chosen layers, under their new numbers, and all other weights."""

    whole: Source
    header: Header
    origins: Mapping[Key, Key]
    """Tensors -> those of the whole model."""
    notices: Sequence[str]
    """For people: the layers of the output."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        found = dict(self.whole.tensors())
        for key, origin in self.origins.items():
            yield key, found[origin]


def with_layers(source: Source, chosen: Sequence[int], place: str) -> ChosenLayers:
    """The model of the chosen layers, counted from 0.

    place: the source, for messages. Raises UsageError for a layer that there isn't, UnsupportedInput for adapters and
    for models whose layers megaconv doesn't know or which compute with the numbers of layers, NotExpressible for models
    that don't remain one without a layer.
    """
    header = source.header
    _require_layers(header, chosen, place)
    config = _config(header.config, chosen)
    origins = _origins(header, config, chosen)
    manifest = {key: header.manifest[origin] for key, origin in origins.items()}
    made = replace(
        derived_header(header, config, manifest, origins),
        layout=header.layout and layout_for(header.layout, config.layer_count),
    )
    return ChosenLayers(source, made, origins, [_notice(chosen)])


def _notice(chosen: Sequence[int]) -> str:
    """A line for people: the layers of the output."""
    spans: list[list[int]] = []
    for layer in chosen:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    listed = ", ".join(" to ".join(map(str, span)) for span in spans)
    return f"{counted(len(chosen), 'layer')} of the input: {listed}"


def _require_layers(header: Header, chosen: Sequence[int], place: str) -> None:
    config = header.config
    require_language_model(header, place, "--layers")
    require_choosable(header, place, "--layers", "leave --layers out")
    if max(chosen) >= config.layer_count:
        raise UsageError(
            f"--layers: {place} has no layer {max(chosen)}; its layers are 0 to {config.layer_count - 1}"
        )


def require_choosable(header: Header, place: str, subject: str, remedy: str) -> None:
    """Raise UnsupportedInput for a model whose layers can't have other numbers. subject, remedy: for the message."""
    reason = _numbered(header)
    if reason:
        raise UnsupportedInput(
            f"{subject}: {place} is a {header.config.family}, {reason}; {remedy}"
        )


def _numbered(header: Header) -> str:
    """The reason why layers can't have other numbers; empty if they can."""
    config = header.config
    if config.blocks.count:
        return "whose layers share blocks by their numbers"
    computed = family(config.family).numbered
    if computed:
        return f"which computes {computed} with the numbers of layers"
    if any(
        f".{_LAYERS}" in key.name and not key.name.startswith("mtp.") for key in header.manifest
    ):
        return "which has several stacks of layers"
    return ""


def _config(config: ModelConfig, chosen: Sequence[int]) -> ModelConfig:
    """The configuration of the model. Raises NotExpressible if no such model is possible."""
    try:
        made = replace(config, layers=tuple(config.layers[layer] for layer in chosen))
    except CorruptCheckpoint as error:
        raise NotExpressible(f"--layers: no {config.family} has these layers: {error}") from error
    return replace(made, hf=_own_config(config, made))


def _own_config(whole: ModelConfig, made: ModelConfig) -> Mapping[str, Any] | None:
    """The model's own config.json for the new layers; None if it isn't known, or can't describe them.

    A key that no family writes stays, unless it says something of each of the old layers.
    """
    if whole.hf is None:
        return None
    table = family(made.family)
    try:
        written = table.write_hf(made)
        changed: dict[str, Any] = json.loads(table.config_json(made))
    except NotExpressible:
        return None
    count = whole.layer_count
    return {
        key: value
        for key, value in changed.items()
        if key in written or not _lists_layers(value, count)
    }


def _lists_layers(value: Any, count: int) -> bool:
    """True for a list with an entry for each layer, and for an object of objects by the numbers of layers."""
    if isinstance(value, Mapping):
        return bool(value) and all(
            key.isdecimal() and isinstance(inner, Mapping) for key, inner in value.items()
        )
    return isinstance(value, list) and len(value) == count


def _origins(header: Header, config: ModelConfig, chosen: Sequence[int]) -> dict[Key, Key]:
    """Tensors of the model of the chosen layers, in model order -> those of the whole model. Raises NotExpressible."""
    shapes = canonical_shapes(family(config.family).rows, config)
    found = dict(_renumbered(header.manifest, chosen))
    unlike = found.keys() ^ shapes.keys() or {
        name for name, origin in found.items() if header.manifest[origin].shape != shapes[name]
    }
    if unlike:
        raise NotExpressible(
            f"--layers: {listing(sorted(unlike))} of a {config.family} depends on the numbers of layers; choose other layers"
        )
    return {Key(name): found[name] for name in shapes}


def _renumbered(manifest: Iterable[Key], chosen: Sequence[int]) -> Iterator[tuple[str, Key]]:
    """Yield (a weight's name with the new number of its layer, the weight of the whole model)."""
    layers: dict[int, list[tuple[str, Key]]] = {}
    for key in manifest:
        if key.slot != WEIGHT:
            continue
        if not key.name.startswith(_LAYERS):
            yield key.name, key
            continue
        number, _, rest = key.name.removeprefix(_LAYERS).partition(".")
        layers.setdefault(int(number), []).append((rest, key))
    for new, old in enumerate(chosen):
        yield from ((f"{_LAYERS}{new}.{rest}", key) for rest, key in layers.get(old, []))
