"""What a rank holds: native tensors, worked out from a family's table as rectangles of canonical ones.

A rank's tensor is made by sharding each canonical piece for that rank first and joining the shards after, so that
fused tensors need no tensor-parallel code of their own: all that comes out are rectangles of canonical tensors and where
they lie in native ones. Evaluated in a rank's own sizes (heads / tp, ffn / tp ...) a shape is the rank's shape.

Layers and experts of one row differ in their names only. So a row is worked out once for a rank, with `{l}` and `{e}` left
in all names, and filled in for each layer and expert: the tensors of one row share their regions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from formats.tensor import Box, Shape, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.naming import Naming
from megaconv.model.sharding import RANKS, rank_sizes
from megaconv.model.table import (
    Fused,
    Halves,
    OtherAxis,
    RotaryPairs,
    Row,
    Separate,
    Stacked,
    StackedTransposed,
    Transposed,
    evaluate,
    expand,
    layers_of,
    of_layer,
)


class Region(NamedTuple):
    """A rectangle of a canonical tensor, and where in the native one its first element lies.

    Untransposed rectangles are as wide as the native tensor. transposed: the rectangle's rows are native columns.
    pairs > 0: rows come in heads of that many, from a head's first row on; the native tensor has row i of a head's first
    half and row i of its second one after the other (Meta's rotary order).
    halves: the rectangle's rows alternate between the two halves of as many native rows, its first row in the first half.
    row_step: how far its rows lie apart in the native tensor; more than 1 only in old files, which are read and not written.
    repeat > 1: the rectangle is a single row that is stored that many times (vocabulary padding).
    """

    box: Box
    row: int
    col: int = 0
    transposed: bool = False
    pairs: int = 0
    halves: bool = False
    row_step: int = 1
    repeat: int = 1


class Copy(NamedTuple):
    """A native tensor that holds again what another one of the same checkpoint holds. A source may lack it."""

    written: bool
    """Whether such a checkpoint has it by rights, so that savers write it."""
    used: bool = True
    """Whether the model computes with it: what an unused copy holds means nothing."""
    must_equal: bool = False
    """Whether it is trained for itself: with other values it is another model."""


class NativeTensor(NamedTuple):
    """One tensor of a checkpoint file: which canonical tensors' rectangles it is made of."""

    name: str
    parts: Mapping[str, tuple[Region, ...]]
    """By canonical name."""
    shape: Shape
    replicated: bool = False
    """Every tensor-parallel rank holds the same copy."""
    tp: int | None = None
    """The axis that tensor parallelism shards, or expert tensor parallelism; None where it shards none."""
    groups: int | None = None
    """Of a tensor joined by groups: how many the whole one has. A rank has some of them, or where there are more ranks an
    even share of the rows."""
    copy: Copy | None = None
    """Set if it is a second copy."""
    of_experts: bool = False
    """Held by one expert-parallel rank, where others hold other experts."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""
    view: tuple[int, int] | None = None
    """The matrix that regions count rows and columns in, where it is not that of the shape."""


class _Shard(NamedTuple):
    """What a rank holds of a canonical tensor."""

    name: str
    """A pattern."""
    box: Box
    inner: Shape
    """Axes of the tensor between the first and the last; they count as rows, and are never sharded."""


class _Template(NamedTuple):
    """A row's native tensor on a rank, with `{l}` and `{e}` left in its name and in those of its parts."""

    native: NativeTensor
    each_expert: bool = False
    """Whether there is one for every expert of the rank; otherwise it holds all of them, or the row is of none."""

    def of(self, local_layer: int, layer: int) -> NativeTensor:
        """That of one layer; `{e}` is left in names."""
        parts = {of_layer(name, layer): regions for name, regions in self.native.parts.items()}
        return NativeTensor(of_layer(self.native.name, local_layer), parts, *self.native[2:])


def _of_expert(native: NativeTensor, local: str, expert: str) -> NativeTensor:
    parts = {name.replace("{e}", expert): regions for name, regions in native.parts.items()}
    return NativeTensor(native.name.replace("{e}", local), parts, *native[2:])


@dataclass(frozen=True)
class _Rank:
    """Whose tensors are asked for."""

    config: ModelConfig
    naming: Naming
    layout: Layout
    whole: Mapping[str, int]
    """Sizes of the whole model, its vocabulary padded."""
    sizes: Mapping[str, int]
    """This rank's own."""
    tp_rank: int
    ep_rank: int
    templates: dict[Row, tuple[_Template, ...]] = field(default_factory=dict)

    def natives(self, row: Row, local_layer: int, layer: int) -> Iterator[NativeTensor]:
        """Those of one layer of a row. Raises NotExpressible where the naming scheme has no name for them."""
        if row not in self.templates:
            spelled = row.spelling(self.naming)
            if not spelled:
                what = row.when or "this tensor"
                raise NotExpressible(f"{row.canonical}: the {self.naming} naming has no words for {what}")
            self.templates[row] = tuple(_templates(row, spelled, self))
        natives = [template.of(local_layer, layer) for template in self.templates[row]]
        if self.templates[row][0].each_expert:
            for local, expert in enumerate(self.experts):
                yield from (_of_expert(native, str(local), str(expert)) for native in natives)
        else:
            yield from natives

    def copy(self, row: Row, name: str | None, copy: Copy, number: int = 0) -> NativeTensor:
        """A second copy of a row's tensor. name: its own if None. number: of the layer in its name."""
        spelled = row.spelling(self.naming) if name is None else (Separate(name),)
        (template,) = _templates(row, spelled, self)
        return template.of(number, 0)._replace(copy=copy)

    @property
    def experts(self) -> range:
        """The global numbers of this rank's experts."""
        count = self.sizes["local_experts"]
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


def native_tensors(
    rows: tuple[Row, ...],
    config: ModelConfig,
    naming: Naming,
    layout: Layout,
    tp_rank: int,
    chunk: Chunk,
    vocab_rows: int,
    ep_rank: int = 0,
) -> Iterator[NativeTensor]:
    """What one rank holds of one chunk. vocab_rows: of the whole vocabulary, padding included.

    Layers in names count from 0 in each chunk, and experts from 0 on each expert-parallel rank, as Megatron has it. Second
    copies of tensors are there too (`copy`), also those that such a checkpoint needn't have.
    Raises LayoutError for what can't be sharded, NotExpressible for what the naming scheme has no name for.
    """
    whole = config.sizes()
    what = "vocabulary" if vocab_rows == whole["vocab"] else "padded vocabulary"
    divide(vocab_rows, layout.tp, what, RANKS["tp"])
    # Megatron core alone lets tensor ranks share key/value heads.
    sizes = rank_sizes(config, layout, shares_heads=naming.scheme == "core")
    rank = _Rank(config, naming, layout, whole | {"vocab": vocab_rows}, sizes, tp_rank, ep_rank)
    for row in rows:
        if row.stage == "mtp":
            continue
        for local, layer in layers_of(row.stage, config, chunk):
            if row.exists(config, layer):
                yield from rank.natives(row, local, layer)
                yield from _second_names(row, rank)
        if config.tie_embeddings and chunk.is_last:
            yield from _tied(row, rank, chunk)
    if chunk.encoder is not None:
        yield from _stacks_apart(rows, rank, chunk)
    if chunk.is_last:
        yield from _mtp(rows, rank, chunk)


def _names(row: Row, rank: _Rank, place: str) -> Iterator[str]:
    """What second copies at a place are called."""
    return (name for copied in row.copied_with(place) for name in copied.names.get(rank.naming.scheme, ()))


def _second_names(row: Row, rank: _Rank) -> Iterator[NativeTensor]:
    """Megatron writes a tensor under all its names, Hugging Face once."""
    copy = Copy(written=rank.naming.scheme != "hf")
    return (rank.copy(row, name, copy) for name in _names(row, rank, "itself"))


def _tied(row: Row, rank: _Rank, chunk: Chunk) -> Iterator[NativeTensor]:
    """A tied head: Megatron has it again where the embedding is on another stage, Meta always, Hugging Face never."""
    scheme = rank.naming.scheme
    copy = Copy(written=scheme == "meta" or (scheme != "hf" and not chunk.embeds))
    return (rank.copy(row, name, copy) for name in _names(row, rank, "head"))


def _mtp(rows: tuple[Row, ...], rank: _Rank, chunk: Chunk) -> Iterator[NativeTensor]:
    """Layers that predict further tokens: Megatron counts them for themselves, Hugging Face after all others."""
    config, copy = rank.config, Copy(written=True)
    for layer in range(config.mtp_layers):
        local = config.layer_count + layer if rank.naming.scheme == "hf" else layer
        for row in (row for row in rows if row.stage == "mtp" and row.exists(config, config.layer_count - 1)):
            yield from rank.natives(row, local, layer)
        for row in (row for row in rows if row.exists(config, 0)):
            for name in _names(row, rank, "mtp"):
                # One for each such layer, or one for all where the tensor itself is on another stage.
                if "{l}" in name or (layer == 0 and not chunk.is_first):
                    yield rank.copy(row, name, copy, local)


def _stacks_apart(rows: tuple[Row, ...], rank: _Rank, chunk: Chunk) -> Iterator[NativeTensor]:
    """What a chunk holds again because an encoder and its decoder are on stages of their own."""
    has_unused_head = chunk.ends_encoder and rank.naming.scheme == "core"
    for row in (row for row in rows if row.exists(rank.config, 0)):
        names = (None, *_names(row, rank, "itself"))
        if chunk.starts_decoder and any(row.copied_with("decoder")):
            yield from (rank.copy(row, name, Copy(written=True)) for name in names)
        if has_unused_head and any(row.copied_with("encoder_end")):
            yield from (rank.copy(row, name, Copy(written=True, used=False)) for name in names)
        if any(row.copied_with("stacks")) and not (chunk.ends_encoder if row.stage == "between" else chunk.is_last):
            used = bool(chunk.encoder) == (row.stage == "between")  # each stack computes with its own
            copy = Copy(written=True, used=used, must_equal=used)
            yield from (rank.copy(row, name, copy) for name in names)
        if has_unused_head and rank.config.tie_embeddings and not chunk.embeds:
            unused = Copy(written=True, used=False)
            yield from (rank.copy(row, name, unused) for name in _names(row, rank, "head"))


def _templates(row: Row, spelled: tuple[Separate, ...], rank: _Rank) -> Iterator[_Template]:
    """The native tensors of a row on a rank. spelled: all that it is in a naming scheme."""
    for spelling, members in row.shared_out(spelled):
        if isinstance(spelling, (Stacked, StackedTransposed, Transposed)):
            yield _Template(_stacked(row, spelling, members, rank))
        elif isinstance(spelling, Fused):
            yield _Template(_fused(row, spelling, members, rank), row.of_experts)
        else:
            shards = _shards(row, spelling, members, rank)
            for member, name, shard in zip(members, expand(spelling.name), shards, strict=True):
                native = _join(name, [shard], 1, row, spelling, rank)
                if isinstance(spelling, RotaryPairs) and member in spelling.rotating:
                    native = _rearranged(native, pairs=rank.sizes["head_dim"])
                native = _rearranged(native, halves=True) if isinstance(spelling, Halves) else native
                yield _Template(native, row.of_experts)


def _shards(
    row: Row, spelling: Separate, members: tuple[int, ...], rank: _Rank, *, sharded: bool = True
) -> list[_Shard]:
    """What the rank holds of these tensors of a row; all of them if not sharded."""
    axis = _axis(row, spelling) if sharded else None
    over, index = ("etp", rank.tp_rank % rank.layout.etp) if row.of_experts else ("tp", rank.tp_rank)
    count = rank.layout.sizes()[over]
    names, shards = expand(row.canonical), []
    for member in members:
        shape = evaluate(row.shapes[member], rank.whole)
        rows, cols = matrix_shape(shape)
        if axis == 0:
            rows = divide(rows, count, f"rows of {row.canonical}", RANKS[over])
        elif axis == 1:
            cols = divide(cols, count, f"columns of {row.canonical}", RANKS[over])
        row0, col0 = index * rows if axis == 0 else 0, index * cols if axis == 1 else 0
        shards.append(_Shard(names[member], Box(row0, row0 + rows, col0, col0 + cols), shape[1:-1]))
    return shards


def _axis(row: Row, spelling: Separate) -> int | None:
    """What tensor parallelism shards in this naming scheme."""
    return spelling.tp if isinstance(spelling, OtherAxis) else row.tp


def _rearranged(native: NativeTensor, *, pairs: int = 0, halves: bool = False) -> NativeTensor:
    """The same rows in another order: each head's two halves as pairs of rows, or pairs of rows as two halves."""
    parts = {
        name: tuple(region._replace(pairs=pairs, halves=halves) for region in regions)
        for name, regions in native.parts.items()
    }
    return native._replace(parts=parts)


def _fused(row: Row, spelling: Fused, members: tuple[int, ...], rank: _Rank) -> NativeTensor:
    """Whole groups of a rank's own; or, with more ranks than groups, its share of the rows of the whole tensor."""
    (groups,) = evaluate(spelling.groups, rank.whole)
    if spelling.groups != "1" and row.tp == 0 and rank.layout.tp > groups:
        whole = _join(spelling.name, _shards(row, spelling, members, rank, sharded=False), groups, row, spelling, rank)
        rows = divide(whole.shape[0], rank.layout.tp, f"rows of {spelling.name}", RANKS["tp"])
        return _rows_of(whole, rank.tp_rank * rows, rows)._replace(groups=groups)
    (own,) = evaluate(spelling.groups, rank.sizes)
    native = _join(spelling.name, _shards(row, spelling, members, rank), own, row, spelling, rank)
    return native._replace(groups=None if spelling.groups == "1" else groups)


def _join(name: str, shards: list[_Shard], groups: int, row: Row, spelling: Separate, rank: _Rank) -> NativeTensor:
    """Join shards along the rows, group by group."""
    parts: dict[str, tuple[Region, ...]] = {}
    group_rows = sum(shard.box.rows for shard in shards) // groups
    before = padding = 0
    for piece, box, _ in shards:
        step = box.rows // groups
        if row.padded_vocab:
            padding = min(box.rows, max(0, box.row1 - rank.sizes["vocab"]))
            step -= padding
        starts = ((box.row0 + group * step, group * group_rows + before) for group in range(groups))
        parts[piece] = tuple(Region(Box(first, first + step, box.col0, box.col1), at) for first, at in starts if step)
        before += step
    inner, axis = shards[0].inner, _axis(row, spelling)
    is_vector = " " not in row.shapes[0]
    rows = sum(shard.box.rows for shard in shards) // prod(inner)
    shape = (rows, *inner, *(() if is_vector else (shards[0].box.cols,)))
    return NativeTensor(name, parts, shape, axis is None, axis, of_experts=row.of_experts, padding_rows=padding)


def _rows_of(native: NativeTensor, first: int, rows: int) -> NativeTensor:
    """A run of rows of a joined tensor."""
    parts: dict[str, tuple[Region, ...]] = {}
    for name, regions in native.parts.items():
        kept = []
        for region in regions:
            start, stop = max(first, region.row), min(first + rows, region.row + region.box.rows)
            if start < stop:
                row0 = region.box.row0 + start - region.row
                box = region.box._replace(row0=row0, row1=row0 + stop - start)
                kept.append(region._replace(box=box, row=start - first))
        if kept:
            parts[name] = tuple(kept)
    return native._replace(parts=parts, shape=(rows, *native.shape[1:]))


def _stacked(row: Row, spelling: Separate, members: tuple[int, ...], rank: _Rank) -> NativeTensor:
    """All of a rank's experts (or the row's only tensors) in one, the pieces of each beside or under each other."""
    shards = _shards(row, spelling, members, rank)
    experts = [str(expert) for expert in rank.experts] if row.of_experts else [""]
    pieces = [[shard.name.replace("{e}", expert) for shard in shards] for expert in experts]
    boxes = [shard.box for shard in shards]
    if isinstance(spelling, Stacked):
        return _under_each_other(spelling.name, pieces, boxes)
    shape = evaluate(spelling.shape, rank.sizes) if isinstance(spelling, StackedTransposed) else None
    return _side_by_side(spelling.name, shape, pieces, boxes, row)


def _side_by_side(name: str, shape: Shape | None, pieces: list[list[str]], boxes: list[Box], row: Row) -> NativeTensor:
    """One block of rows [in] per expert (or the only one), its pieces as columns [out]; shape None: as it is."""
    parts: dict[str, tuple[Region, ...]] = {}
    for local_expert, names in enumerate(pieces):
        col = 0
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, local_expert * box.cols, col, transposed=True),)
            col += box.rows
    view = (len(pieces) * boxes[0].cols, sum(box.rows for box in boxes))
    return NativeTensor(name, parts, shape or view, of_experts=row.of_experts, view=view)


def _under_each_other(name: str, pieces: list[list[str]], boxes: list[Box]) -> NativeTensor:
    """[experts, out, in]: one expert under the other, the pieces of each one under the other."""
    parts: dict[str, tuple[Region, ...]] = {}
    row = 0
    for names in pieces:
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, row),)
            row += box.rows
    return NativeTensor(name, parts, (len(pieces), row // len(pieces), boxes[0].cols), of_experts=True)
