"""--keep-experts: a mixture with some of its experts."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from formats.tensor import LazyTensor
from formats.wording import counted, listing
from megaconv.engine.derived import (
    derived_header,
    require_language_model,
    require_within,
    same_number,
)
from megaconv.errors import NotExpressible, UnsupportedInput, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key, Source, TensorInfo
from megaconv.model.layout import Layout
from megaconv.model.subjects import RANKED_BY, Experts
from megaconv.model.table import canonical_shapes
from megaconv.options.kept_experts import EVERYWHERE
from megaconv.options.kept_file import Kept
from megaconv.values.selected import SelectedRows

_OPTION = "--keep-experts"
_EXPERT = re.compile(r"(?P<layer>(?:layers|mtp)\.\d+)\.mlp\.experts\.(?P<expert>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class KeptExperts:
    """A mixture's weights without some of the experts. The router's rows for them are left out too."""

    whole: Source
    """The mixture with all experts."""
    header: Header
    kept: Mapping[str, tuple[int, ...]]
    """The experts that stay, by layer."""
    origins: Mapping[Key, Key]
    """Tensors of experts -> those of the whole model."""
    rows: Mapping[Key, tuple[int, ...]]
    """Tensors with a row for each expert -> the rows of the whole model's that stay."""
    notices: Sequence[str]
    """For people: the number of experts."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        found = dict(self.whole.tensors())
        for key in self.header.manifest:
            tensor = found[self.origins.get(key, key)]
            rows = self.rows.get(key)
            yield key, tensor if rows is None else SelectedRows(tensor, rows)


def with_kept_experts(source: Source, chosen: Kept, place: str) -> KeptExperts:
    """The model with these experts, counted from 0.

    place: the source, for messages. Raises UnsupportedInput for models without experts and for those whose tokens choose experts
    by their numbers, UsageError for experts that there aren't and for numbers that differ from layer to layer, NotExpressible for
    models with other tensors by expert.
    """
    header = source.header
    _require_experts(header, place)
    kept = _by_layer(header, chosen, place)
    config = _config(header.config, kept)
    manifest, origins, rows = _tensors(header, config, kept)
    made = replace(
        derived_header(header, config, manifest, origins, altered=rows),
        layout=_layout(header.layout, config.experts.count),
    )
    before, after = header.config.experts.count, config.experts.count
    notice = f"{after} of the {counted(before, 'expert')} of each layer"
    return KeptExperts(source, made, kept, origins, rows, [notice])


def _require_experts(header: Header, place: str) -> None:
    config = header.config
    require_language_model(header, place, _OPTION)
    if not layers_with_experts(header):
        raise UnsupportedInput(f"{_OPTION}: {place} has no experts; leave the option out")
    if config.has("hash_layers"):
        raise UnsupportedInput(
            f"{_OPTION}: {place} is a {config.family}, which stores the experts of each token by their numbers; leave the option out"
        )


def _by_layer(header: Header, chosen: Kept, place: str) -> dict[str, tuple[int, ...]]:
    """The experts that stay, by layer. Raises UsageError."""
    count = header.config.experts.count
    layers = layers_with_experts(header)
    named = dict.fromkeys(layers, chosen[EVERYWHERE]) if chosen.keys() == {EVERYWHERE} else chosen
    kept = {layer: tuple(named[layer]) for layer in layers if layer in named}
    missing = [layer for layer in layers if layer not in kept]
    unknown = [layer for layer in named if layer not in kept]
    if missing:
        raise UsageError(
            f"{_OPTION}: says nothing of {listing(missing)}, which has experts in {place} too; name the experts of each layer"
        )
    if unknown:
        raise UsageError(f"{_OPTION}: {listing(unknown)} of {place} has no experts")
    require_within(kept, count, "expert", _OPTION, place)
    return kept


def layers_with_experts(header: Header) -> list[str]:
    """The layers with experts, in model order. A model may have a number of experts, and no such layer."""
    matches = [_EXPERT.fullmatch(key.name) for key in header.manifest if key.slot == WEIGHT]
    found = [match["layer"] for match in matches if match]
    return list(dict.fromkeys(found))


def _config(config: ModelConfig, kept: Mapping[str, Sequence[int]]) -> ModelConfig:
    """The configuration of the model. Raises UsageError if no such model is possible, and NotExpressible."""
    size = same_number(kept, "expert", _OPTION)
    for layer, experts in kept.items():
        require_routable(config.experts, experts, f"{_OPTION}: {layer}")
    made = replace(config, experts=replace(config.experts, count=size))
    if config.hf is None:
        return made
    own = family(config.family).config_json(made)
    return replace(made, hf=json.loads(own))


def require_routable(experts: Experts, kept: Sequence[int], subject: str) -> None:
    """Raise UsageError if a router can't choose among these experts as among all. subject: for the message."""
    least = experts.per_token - experts.zero
    if len(kept) < least:
        raise UsageError(
            f"{subject}: keeps {counted(len(kept), 'expert')}, and each token needs {experts.per_token}; keep {least} or more"
        )
    groups, best = experts.groups or 1, experts.group_topk or 1
    of_groups = Counter(expert * groups // experts.count for expert in kept)
    size = len(kept) // groups
    if set(of_groups.values()) != {size} or len(of_groups) != groups:
        raise UsageError(
            f"{subject}: the router has {groups} groups of experts; keep the same number of each group"
        )
    needed = max(RANKED_BY, -(-experts.per_token // best))
    # A class with groups ranks them also if it takes all of them.
    if experts.groups and size < needed:
        raise UsageError(
            f"{subject}: keeps {size} of each group of experts; the router needs {needed} or more"
        )


def _tensors(
    header: Header, config: ModelConfig, kept: Mapping[str, tuple[int, ...]]
) -> tuple[dict[Key, TensorInfo], dict[Key, Key], dict[Key, tuple[int, ...]]]:
    """(the manifest in model order, the origins of experts, the rows of routers). Raises NotExpressible."""
    count = header.config.experts.count
    manifest: dict[Key, TensorInfo] = {}
    origins: dict[Key, Key] = {}
    rows: dict[Key, tuple[int, ...]] = {}
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        key, origin = Key(name), Key(_name_in_whole(name, kept))
        if origin != key:
            origins[key] = origin
        info = header.manifest[origin]
        experts = kept.get(name.partition(".mlp.")[0])
        if info.shape != shape and experts:
            # Rows behind those of the experts are of further routes, such as LongCat's experts that compute nothing.
            rows[key] = (*experts, *range(count, info.shape[0]))
            info = TensorInfo((len(rows[key]), *info.shape[1:]), info.dtype)
        if info.shape != shape:
            raise NotExpressible(
                f"{_OPTION}: {name} of a {config.family} depends on the number of experts; leave the option out"
            )
        manifest[key] = info
    return manifest, origins, rows


def _name_in_whole(name: str, kept: Mapping[str, Sequence[int]]) -> str:
    """The whole model's name of a tensor."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    layer = match["layer"]
    number = kept[layer][int(match["expert"])]
    return f"{layer}.mlp.experts.{number}.{match['rest']}"


def _layout(layout: Layout | None, count: int) -> Layout | None:
    """The layout of the source, with as many expert-parallel ranks as divide the experts."""
    return layout and replace(layout, ep=gcd(layout.ep, count))
