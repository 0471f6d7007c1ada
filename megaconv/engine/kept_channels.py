"""--keep-channels: a narrower model, of some channels of the hidden states and of the MLPs.

hidden              rows and columns of every tensor with an axis of the hidden states
layers.3.mlp        rows of the first matrices of an MLP, and columns of its last one
"""

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.tensor import LazyTensor
from formats.wording import listing
from megaconv.engine.derived import (
    derived_header,
    require_language_model,
    require_within,
    same_number,
)
from megaconv.errors import CorruptCheckpoint, NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.model.meaning import lost_fields, require_kept
from megaconv.model.table import canonical_axes, canonical_shapes
from megaconv.options.kept_channels import HIDDEN, KeptChannels
from megaconv.options.kept_file import Kept
from megaconv.values.selected import SelectedColumns, SelectedRows

_OPTION = "--keep-channels"
_MLP = re.compile(r"(?P<mlp>.+?\.mlp(?:\.experts\.\d+|\.shared)?)\.")
WIDTHS = {"ffn": "mlp.ffn", "moe_ffn": "experts.ffn", "shared_ffn": "experts.shared_ffn"}
"""The sizes of MLPs' channels -> the fields that hold them: of dense MLPs, routed experts, shared experts."""
NAMES = {
    HIDDEN: "the hidden states",
    "mlp.ffn": "each MLP",
    "experts.ffn": "each expert",
    "experts.shared_ffn": "each shared expert",
}
"""Fields -> what has these channels, for lines."""
_ALTERNATING = "2*moe_ffn"
"""An axis of an expert whose rows are those of its two first matrices by turns."""
_ROOTS = ("embedding_scale", "head.divisor")
"""Fields that are the root of the hidden size in some families."""
_Selected = Mapping[Key, Sequence[int]]


@dataclass(frozen=True)
class NarrowedModel:
    """A model's weights without some of its channels."""

    whole: Source
    """The model with all channels."""
    header: Header
    chosen: KeptChannels
    rows: _Selected
    """Tensors -> their rows that stay; others keep all rows."""
    columns: _Selected
    """The same of columns."""
    sizes: Mapping[str, int]
    """The new sizes by field, such as `hidden` and `mlp.ffn`."""

    @property
    def sizes_before(self) -> dict[str, int]:
        """The same sizes of the whole model."""
        return {field: value_of(self.whole.header.config, field) for field in self.sizes}

    @property
    def notices(self) -> Sequence[str]:
        """For people: the new sizes."""
        before = self.sizes_before
        return [
            f"{size} of {before[field]} channels of {NAMES[field]}"
            for field, size in self.sizes.items()
        ]

    @property
    def origins(self) -> Mapping[Key, Key]:
        """Tensors with another name in the whole model: none."""
        return {}

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        found = dict(self.whole.tensors())
        for key in self.header.manifest:
            tensor = found[key]
            if key in self.rows:
                tensor = SelectedRows(tensor, self.rows[key])
            if key in self.columns:
                tensor = SelectedColumns(tensor, self.columns[key])
            yield key, tensor


def with_kept_channels(source: Source, chosen: KeptChannels, place: str) -> NarrowedModel:
    """The model with these channels, counted from 0.

    place: the source, for messages. Raises UnsupportedInput for adapters and for models of no family, UsageError for channels
    or MLPs that there aren't and for numbers that differ from MLP to MLP, NotExpressible if no such model is possible.
    """
    header = source.header
    require_language_model(header, place, _OPTION)
    axes = canonical_axes(family(header.config.family).rows, header.config)
    sizes = _sizes(header.config, axes, chosen.numbers, place)
    config = _config(header.config, axes, sizes)
    rows, columns = _selected(header.config, axes, chosen.numbers)
    manifest = _manifest(header, config, rows, columns)
    made = derived_header(header, config, manifest, {}, altered={*rows, *columns})
    return NarrowedModel(source, made, chosen, rows, columns, sizes)


def mlp_of(name: str) -> str | None:
    """The canonical name of the MLP that a tensor belongs to; None for other tensors."""
    match = _MLP.match(name)
    return match and match["mlp"]


def places_of(axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The places whose channels can be chosen: `hidden`, and MLPs by their canonical names -> the field that holds their size.

    axes: of all tensors.
    """
    found = {HIDDEN: HIDDEN}
    for name, of_tensor in axes.items():
        mlp = mlp_of(name)
        widths = [axis for axis in of_tensor if axis in WIDTHS or axis == _ALTERNATING]
        if mlp and widths:
            found[mlp] = WIDTHS[widths[0].rpartition("*")[2]]
    return found


def is_hidden(axis: str, config: ModelConfig) -> bool:
    """True for an axis of the channels of the hidden states."""
    return axis == HIDDEN or (axis == "expert_hidden" and not config.experts.latent)


def _sizes(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], chosen: Kept, place: str
) -> dict[str, int]:
    """Fields -> their new sizes. Raises UsageError."""
    known = places_of(axes)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UsageError(f"{_OPTION}: {place} has no {listing(unknown)}")
    by_field: dict[str, dict[str, Sequence[int]]] = {}
    for name in chosen:
        by_field.setdefault(known[name], {})[name] = chosen[name]
    for field, kept in by_field.items():
        missing = [name for name, of in known.items() if of == field and name not in kept]
        if missing:
            raise UsageError(
                f"{_OPTION}: says nothing of {listing(missing)}, which has the same width in {place}; name the channels of each of them"
            )
        require_within(kept, value_of(config, field), "channel", _OPTION, place)
    return {field: same_number(kept, "channel", _OPTION) for field, kept in by_field.items()}


def _config(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> ModelConfig:
    """The configuration of the model. Raises NotExpressible if no such model is possible."""
    has_own_widths = any(kind.ffn is not None for kind in config.layers)
    has_encoder_width = any("encoder_ffn" in of_tensor for of_tensor in axes.values())
    if "mlp.ffn" in sizes and (has_own_widths or has_encoder_width):
        raise NotExpressible(
            f"{_OPTION}: layers of this {config.family} have MLPs of other widths; keep the channels of MLPs"
        )
    try:
        narrowed = changed(config, {**sizes, **_following(config, axes, sizes)})
        return replace(narrowed, hf=_own_config(narrowed))
    except (CorruptCheckpoint, NotExpressible) as error:
        raise NotExpressible(f"{_OPTION}: no {config.family} has these sizes: {error}") from error


def _following(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Values that follow from the new sizes."""
    found: dict[str, Any] = {}
    has_dense = "mlp.ffn" in places_of(axes).values()
    if not has_dense and "experts.ffn" in sizes and config.mlp.ffn == config.experts.ffn:
        found["mlp.ffn"] = sizes["experts.ffn"]  # a width that no tensor has
    for field in _ROOTS if HIDDEN in sizes else ():
        value = value_of(config, field)
        if value == math.sqrt(config.hidden) and not _is_stated(config, field):
            found[field] = math.sqrt(sizes[HIDDEN])
    return found


def _is_stated(config: ModelConfig, field: str) -> bool:
    """True if a config.json of the family states a field, False if its class computes the field with the hidden size."""
    another = changed(config, {field: value_of(config, field) + 1})
    try:
        family(config.family).write_hf(another)
    except NotExpressible:
        return False
    return True


def _own_config(made: ModelConfig) -> Mapping[str, Any] | None:
    """The model's own config.json for the new sizes; None if it isn't known. Raises NotExpressible if it can't describe them."""
    if made.hf is None:
        return None
    table = family(made.family)
    own: dict[str, Any] = json.loads(table.config_json(made))
    if lost_fields(made, _read(own, made)):
        # A key that a config.json leaves out may follow from a size that changes, such as head_dim.
        stated = {key: value for key, value in own.items() if value is not None}
        own = {**own, **table.write_hf(made), **stated}
    require_kept(made, _read(own, made), "its config.json")
    return own


def _read(raw: Mapping[str, Any], made: ModelConfig) -> ModelConfig:
    """The model of a config.json, which may list MTP layers that no file holds."""
    found = family(made.family).read_hf(raw)
    return replace(found, mtp_layers=made.mtp_layers, dtype=made.dtype)


def _selected(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], chosen: Kept
) -> tuple[_Selected, _Selected]:
    """(the rows of tensors that stay, the columns)."""
    rows: dict[Key, Sequence[int]] = {}
    columns: dict[Key, Sequence[int]] = {}
    for name, of_tensor in axes.items():
        of_mlp = chosen.get(mlp_of(name) or "")
        if len(of_tensor) > 2:
            continue  # the shape shows whether such a tensor has these axes
        for axis, found in zip(of_tensor, (rows, columns), strict=False):
            selected = _channels(axis, config, of_mlp, chosen.get(HIDDEN))
            if selected is not None:
                found[Key(name)] = selected
    return rows, columns


def _channels(
    axis: str, config: ModelConfig, of_mlp: Sequence[int] | None, hidden: Sequence[int] | None
) -> Sequence[int] | None:
    """The channels of an axis that stay; None if all do."""
    if axis in WIDTHS:
        return of_mlp
    if axis == _ALTERNATING:
        return of_mlp and array("q", [2 * each + half for each in of_mlp for half in (0, 1)])
    *factors, unit = axis.split("*")
    if not is_hidden(unit, config) or hidden is None:
        return None
    if not factors:
        return hidden
    # Several hidden states one behind the other.
    sizes = config.sizes()
    count = math.prod(int(word) if word.isdigit() else sizes[word] for word in factors)
    starts = range(0, count * config.hidden, config.hidden)
    return array("q", [start + each for start in starts for each in hidden])


def _manifest(
    header: Header, config: ModelConfig, rows: _Selected, columns: _Selected
) -> dict[Key, TensorInfo]:
    """The manifest in model order. Raises NotExpressible for a tensor that depends on the sizes in a way that no table says."""
    manifest: dict[Key, TensorInfo] = {}
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        key = Key(name)
        info = header.manifest[key]
        made = list(info.shape)
        if key in rows:
            made[0] = len(rows[key])
        if key in columns:
            made[-1] = len(columns[key])
        if tuple(made) != shape:
            raise NotExpressible(
                f"{_OPTION}: {name} of a {config.family} depends on these sizes in another way; leave the option out"
            )
        manifest[key] = TensorInfo(shape, info.dtype)
    return manifest
