"""--keep-channels: a narrower model, of some channels of the hidden states and of the MLPs, and of some heads.

hidden              rows and columns of every tensor with an axis of the hidden states
layers.3.mlp        rows of the first matrices of an MLP, and columns of its last one
layers.3.attn       the same of heads, and of the groups that they belong to
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from formats.tensor import LazyTensor, ReshapedTensor
from formats.wording import counted, listing
from megaconv.engine.derived import (
    derived_header,
    require_language_model,
    require_within,
    same_number,
)
from megaconv.engine.kept_places import (
    ALTERNATING,
    HEADS,
    PARTS,
    WIDTHS,
    is_hidden,
    mixer_of,
    mlp_of,
    places_of,
)
from megaconv.engine.narrowed_config import narrowed_config
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.model.patterns import evaluate
from megaconv.model.table import canonical_axes, canonical_shapes
from megaconv.options.kept_channels import HIDDEN, KeptChannels
from megaconv.options.kept_file import Kept
from megaconv.values.selected import SelectedColumns, SelectedRows

_OPTION = "--keep-channels"
_Selected = Mapping[Key, Sequence[int]]


@dataclass(frozen=True)
class NarrowedModel:
    """A model's weights without some of its channels and heads."""

    whole: Source
    """The model with all of them."""
    header: Header
    chosen: KeptChannels
    rows: _Selected
    """Tensors -> the indices of their first axis that stay (see _first_axis); others keep all."""
    columns: _Selected
    """The same of the last axis."""
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
            f"{size} of {before[field]} {PARTS[field]}"
            for field, size in self.sizes.items()
            if size < before[field]
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
                tensor = _with_rows(tensor, self.rows[key])
            if key in self.columns:
                tensor = SelectedColumns(tensor, self.columns[key])
            yield key, tensor


def with_kept_channels(source: Source, chosen: KeptChannels, place: str) -> NarrowedModel:
    """The model with these channels and heads, counted from 0.

    place: the source, for messages. Raises UnsupportedInput for adapters and for models of no family, UsageError for channels,
    MLPs or heads that there aren't and for numbers that differ from MLP to MLP, NotExpressible if no such model is possible.
    """
    header = source.header
    require_language_model(header, place, _OPTION)
    axes = canonical_axes(family(header.config.family).rows, header.config)
    by_field = _by_field(header.config, axes, chosen.numbers, place)
    groups = _groups(header.config, by_field)
    sizes = _sizes(by_field, groups)
    config = narrowed_config(header.config, axes, sizes, _OPTION)
    rows, columns = _selected(header.config, axes, chosen.numbers, groups)
    manifest = _manifest(header, config, rows, columns)
    made = derived_header(header, config, manifest, {}, altered={*rows, *columns})
    return NarrowedModel(source, made, chosen, rows, columns, sizes)


def _with_rows(tensor: LazyTensor, rows: Sequence[int]) -> LazyTensor:
    """Some indices of a tensor's first axis: see _first_axis."""
    if len(tensor.shape) < 3:
        return SelectedRows(tensor, rows)
    first = _first_axis(tensor.shape)
    ones, others = tensor.shape[:first], tensor.shape[first + 1 :]
    matrix = ReshapedTensor(tensor, (tensor.shape[first], math.prod(others)))
    return ReshapedTensor(SelectedRows(matrix, rows), (*ones, len(rows), *others))


def _first_axis(axes: Sequence[int | str]) -> int:
    """The number of the first axis of a vector or a matrix, or the first one that isn't 1 of a tensor with more axes."""
    if len(axes) < 3:
        return 0
    return next(number for number, axis in enumerate(axes) if axis not in (1, "1"))


def _by_field(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], chosen: Kept, place: str
) -> dict[str, Kept]:
    """Fields -> the places whose number they hold, and what these keep. Raises UsageError."""
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
                f"{_OPTION}: says nothing of {listing(missing)}, which has as many {_part(field)}s in {place}; name those of each of them"
            )
        require_within(kept, value_of(config, field), _part(field), _OPTION, place)
    return dict(by_field)


def _part(field: str) -> str:
    """The parts that a field counts, for messages."""
    return "head" if field in HEADS else "channel"


def _groups(config: ModelConfig, by_field: Mapping[str, Kept]) -> dict[str, Kept]:
    """Fields with numbers of groups -> mixers, and their groups that stay. Raises UsageError."""
    found: dict[str, Kept] = {}
    for field, kind in HEADS.items():
        if field in by_field:
            per_group = value_of(config, field) // value_of(config, kind.group_field)
            found[kind.group_field] = _of_heads(by_field[field], per_group)
    return found


def _of_heads(kept: Kept, per_group: int) -> Kept:
    """Mixers -> the groups of the heads that stay, in rising order. kept: mixers -> their heads. Raises UsageError."""
    found: dict[str, tuple[int, ...]] = {}
    for mixer, heads in kept.items():
        sizes = Counter(head // per_group for head in heads)
        _require_equal(sizes, mixer, per_group)
        found[mixer] = tuple(sizes)
    return found


def _require_equal(sizes: Mapping[int, int], mixer: str, per_group: int) -> None:
    """Raise UsageError if groups keep different numbers of heads. sizes: groups -> the numbers that they keep."""
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[least] < sizes[most]:
        raise UsageError(
            f"{_OPTION}: {mixer} keeps {counted(sizes[least], 'head')} of group {least} and {sizes[most]} of group {most}; each "
            f"{per_group} heads in a row are a group, and all groups that stay must keep the same number"
        )


def _sizes(by_field: Mapping[str, Kept], groups: Mapping[str, Kept]) -> dict[str, int]:
    """Fields -> their new sizes. Raises UsageError."""
    parts = {field: same_number(kept, _part(field), _OPTION) for field, kept in by_field.items()}
    of_groups = {field: same_number(kept, "group", _OPTION) for field, kept in groups.items()}
    return {**parts, **of_groups}


def _selected(
    config: ModelConfig,
    axes: Mapping[str, Sequence[str]],
    chosen: Kept,
    groups: Mapping[str, Kept],
) -> tuple[_Selected, _Selected]:
    """(the indices of tensors' first axes that stay, those of their last ones)."""
    rows: dict[Key, Sequence[int]] = {}
    columns: dict[Key, Sequence[int]] = {}
    sizes = config.sizes()
    for name, of_tensor in axes.items():
        kept = _units(name, config, chosen, groups)
        of_rows = _stay(of_tensor[_first_axis(of_tensor)], kept, sizes) if kept else None
        of_columns = _stay(of_tensor[-1], kept, sizes) if len(of_tensor) > 1 else None
        if of_rows is not None:
            rows[Key(name)] = of_rows
        if of_columns is not None:
            columns[Key(name)] = of_columns
    return rows, columns


def _units(name: str, config: ModelConfig, chosen: Kept, groups: Mapping[str, Kept]) -> Kept:
    """The units in a tensor's axes of which some stay, such as `ffn` and `kv_heads` -> those that stay."""
    found: dict[str, Sequence[int]] = {}
    if HIDDEN in chosen:
        hidden = [axis for axis in (HIDDEN, "expert_hidden") if is_hidden(axis, config)]
        found |= dict.fromkeys(hidden, chosen[HIDDEN])
    mlp, mixer = mlp_of(name), mixer_of(name)
    if mlp and mlp in chosen:
        found |= dict.fromkeys(WIDTHS, chosen[mlp])
    if mixer and mixer[0] in chosen:
        place, kind = mixer
        found |= {kind.heads: chosen[place], kind.groups: groups[kind.group_field][place]}
    return found


def _stay(axis: str, kept: Kept, sizes: Mapping[str, int]) -> Sequence[int] | None:
    """The indices of an axis that stay; None if all do. kept: see _units. sizes: of all units."""
    factors = axis.split("*")
    if axis == ALTERNATING:
        factors.reverse()
    unit = next((factor for factor in factors if factor in kept), None)
    if unit is None:
        return None
    if unit == axis:
        return kept[unit]
    place = factors.index(unit)
    numbers = evaluate(" ".join(factors), sizes)
    times, each = math.prod(numbers[:place]), math.prod(numbers[place + 1 :])
    return _elements(kept[unit], numbers[place], times, each)


def _elements(kept: Sequence[int], size: int, times: int, each: int) -> Sequence[int]:
    """The indices of units that stay. size: units that follow one another, `times` times. each: elements of a unit."""
    units = [turn * size + number for turn in range(times) for number in kept]
    return array("q", [unit * each + element for unit in units for element in range(each)])


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
            made[_first_axis(made)] = len(rows[key])
        if key in columns:
            made[-1] = len(columns[key])
        if tuple(made) != shape:
            raise NotExpressible(
                f"{_OPTION}: {name} of a {config.family} depends on these sizes in another way; leave the option out"
            )
        manifest[key] = TensorInfo(shape, info.dtype)
    return manifest
