"""What a rank holds: native tensors, worked out from a family's table as rectangles of canonical ones.

A rank's tensor is made by cutting each canonical piece for that rank first and joining the cut pieces after, so that
fused tensors need no tensor-parallel code of their own: all that comes out are rectangles of canonical tensors and where
they lie in native ones. Evaluated in a rank's own sizes (heads / tp, ffn / tp ...) a shape is the rank's shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from formats.tensor import Box, Shape, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.table import (
    Fused,
    Halves,
    OtherAxis,
    RotaryPairs,
    Row,
    Spelling,
    Stacked,
    StackedTransposed,
    Transposed,
    evaluate,
    expand,
    fill,
    layers_of,
)


@dataclass(frozen=True)
class Region:
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


@dataclass(frozen=True)
class NativeTensor:
    """One tensor of a checkpoint file: which canonical tensors' rectangles it is made of."""

    name: str
    shape: Shape
    parts: Mapping[str, tuple[Region, ...]]
    """By canonical name."""
    replicated: bool = False
    """Every tensor-parallel rank holds the same copy."""
    tp: int | None = None
    """The axis that tensor parallelism cuts, or expert tensor parallelism; None where it cuts none."""
    tied_copy: bool = False
    """A second copy of a tensor, which a file may hold or not."""
    alias: bool = False
    """Such a copy that Megatron always writes."""
    mtp_copy: bool = False
    """Such a copy that belongs to the layers that predict further tokens: savers write it all the same."""
    idle: bool = False
    """Such a copy that Megatron has and never computes with: what it holds means nothing."""
    essential: bool = False
    """Such a copy that Megatron trains for itself: with other values it is another model."""
    of_experts: bool = False
    """Held by one expert-parallel rank, where others hold other experts."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""
    view: tuple[int, int] | None = None
    """The matrix that regions count rows and columns in, where it is not that of the shape."""


def rank_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """The sizes of one tensor-parallel rank's share. Raises LayoutError for what can't be cut."""
    cut = {"heads": layout.tp, "kv_heads": layout.tp}
    if config.layers_with("dense"):
        cut["ffn"] = layout.tp
    if config.experts.shared_ffn:
        cut["shared_ffn"] = layout.tp
    whole = config.sizes()
    sizes = whole | {name: divide(whole[name], size, name, "tensor parallel size (tp)") for name, size in cut.items()}
    if config.experts.count:
        sizes["moe_ffn"] = divide(config.experts.ffn, layout.etp, "moe_ffn", "expert tensor parallel size (etp)")
        sizes["local_experts"] = divide(config.experts.count, layout.ep, "experts", "expert parallel size (ep)")
    return sizes


@dataclass(frozen=True)
class _Rank:
    """Whose tensors are asked for."""

    config: ModelConfig
    naming: str
    layout: Layout
    whole: Mapping[str, int]
    """Sizes of the whole model, its vocabulary padded."""
    sizes: Mapping[str, int]
    """This rank's own."""
    tp_rank: int
    etp_rank: int
    ep_rank: int

    @property
    def experts(self) -> range:
        """The global numbers of this rank's experts."""
        count = self.sizes["local_experts"]
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


def native_tensors(
    rows: tuple[Row, ...],
    config: ModelConfig,
    naming: str,
    layout: Layout,
    tp_rank: int,
    chunk: Chunk,
    vocab_rows: int,
    ep_rank: int = 0,
) -> Iterator[NativeTensor]:
    """What one rank holds of one chunk. vocab_rows: of the whole vocabulary, padding included.

    Layers in names count from 0 in each chunk, and experts from 0 on each expert-parallel rank, as Megatron has it. The
    second copy of a tied embedding is named with the last chunk; whether it is really there is for the caller to say.
    """
    sizes = rank_sizes(config, layout)
    what = "vocabulary" if vocab_rows == config.vocab else "padded vocabulary"
    divide(vocab_rows, layout.tp, what, "tensor parallel size (tp)")
    whole = config.sizes() | {"vocab": vocab_rows}
    rank = _Rank(config, naming, layout, whole, sizes, tp_rank, tp_rank % layout.etp, ep_rank)
    base = naming.partition("+")[0]
    for row in rows:
        if row.stage == "mtp":
            continue
        for local, layer in layers_of(row.stage, config, chunk):
            if row.exists(config, layer):
                yield from _natives(row, rank, local, layer)
                for name in row.aliases.get(base, ()):
                    yield replace(_copy(row, rank, name), alias=True)
        if config.tie_embeddings and chunk.is_last:
            yield from (_copy(row, rank, name) for name in row.tied_copy.get(base, ()))
    if chunk.encoder is not None:
        yield from _apart(rows, rank, chunk)
    if chunk.is_last:
        yield from _mtp(rows, rank, chunk)


def _mtp(rows: tuple[Row, ...], rank: _Rank, chunk: Chunk) -> Iterator[NativeTensor]:
    """Layers that predict further tokens: Megatron counts them for themselves, Hugging Face after all others."""
    config, base = rank.config, rank.naming.partition("+")[0]
    for layer in range(config.mtp_layers):
        local = config.layer_count + layer if base == "hf" else layer
        for row in (row for row in rows if row.stage == "mtp" and row.exists(config, config.layer_count - 1)):
            yield from _natives(row, rank, local, layer)
        for row in rows:
            name = (row.mtp_copy or {}).get(base)
            if name is not None and row.exists(config, 0) and ("{l}" in name or (layer == 0 and not chunk.is_first)):
                yield replace(_copy(row, rank, fill(name, local, None)), mtp_copy=True)


def _apart(rows: tuple[Row, ...], rank: _Rank, chunk: Chunk) -> Iterator[NativeTensor]:
    """What a chunk holds again because an encoder and its decoder are on stages of their own."""
    base = rank.naming.partition("+")[0]
    idle_head = chunk.ends_encoder and base != "legacy"
    for row in (row for row in rows if row.exists(rank.config, 0)):
        copies = [
            replace(_copy(row, rank, name), alias=True) for name in (None, *row.aliases.get(base, ())) if row.repeated
        ]
        if row.repeated == "decoder" and chunk.starts_decoder:
            yield from copies
        elif row.repeated == "idle" and idle_head:
            yield from (replace(copy, idle=True) for copy in copies)
        elif row.repeated == "everywhere" and not (chunk.ends_encoder if row.stage == "between" else chunk.is_last):
            computes = bool(chunk.encoder) == (row.stage == "between")
            yield from (replace(copy, idle=not computes, essential=computes) for copy in copies)
        if idle_head and rank.config.tie_embeddings and not chunk.embeds:
            tied = row.tied_copy.get(base, ())
            yield from (replace(_copy(row, rank, name), alias=True, idle=True) for name in tied)


def _copy(row: Row, rank: _Rank, name: str | None) -> NativeTensor:
    """The same tensor under another name, or in another place."""
    as_head = replace(row, meta=name) if isinstance(row.meta, OtherAxis) else row
    (native,) = _natives(as_head, rank, 0, 0)
    return NativeTensor(
        name or native.name, native.shape, native.parts, tied_copy=True, padding_rows=native.padding_rows
    )


def _natives(row: Row, rank: _Rank, local_layer: int, layer: int) -> Iterator[NativeTensor]:
    spelling = row.spelling(rank.naming)
    if spelling is None:
        raise NotExpressible(f"{row.canonical}: the {rank.naming} naming has no words for {row.when or 'this tensor'}")
    boxes = [_cut(row, spelling, evaluate(shape, rank.whole), rank) for shape in row.shapes]
    experts = rank.experts if row.of_experts else range(1)
    pieces = [[fill(name, layer, expert) for name in expand(row.canonical)] for expert in experts]
    if isinstance(spelling, (StackedTransposed, Transposed)):
        said = evaluate(spelling.shape, rank.sizes) if isinstance(spelling, StackedTransposed) else None
        yield _stack(fill(spelling.name, local_layer, None), said, pieces, boxes, row)
        return
    if isinstance(spelling, Stacked):
        yield _stack_rows(fill(spelling.name, local_layer, None), pieces, boxes)
        return
    for local_expert, names in enumerate(pieces):
        if isinstance(spelling, Fused):
            groups = evaluate(spelling.groups, rank.sizes)[0]
            members = [(spelling.name, names, boxes, groups)]
        else:
            spelled = spelling if isinstance(spelling, str) else spelling.name
            members = [(native, [names[i]], [boxes[i]], 1) for i, native in enumerate(expand(spelled))]
        paired = spelling.members if isinstance(spelling, RotaryPairs) else ()
        for index, (native, joined, their_boxes, groups) in enumerate(members):
            made = _join(fill(native, local_layer, local_expert), joined, their_boxes, groups, row, rank)
            axis = _axis(row, spelling)
            made = replace(made, replicated=axis is None, tp=axis)
            if index in paired:
                made = _rearranged(made, pairs=rank.config.attention.head_dim)
            yield _rearranged(made, halves=True) if isinstance(spelling, Halves) else made


def _cut(row: Row, spelling: Spelling, shape: Shape, rank: _Rank) -> Box:
    """The part of a canonical tensor that a rank holds."""
    rows, cols = matrix_shape(shape)
    axis = _axis(row, spelling)
    index, count = (rank.etp_rank, rank.layout.etp) if row.of_experts else (rank.tp_rank, rank.layout.tp)
    over = "expert tensor parallel size (etp)" if row.of_experts else "tensor parallel size (tp)"
    if axis == 0:
        rows = divide(rows, count, f"rows of {row.canonical}", over)
    elif axis == 1:
        cols = divide(cols, count, f"columns of {row.canonical}", over)
    row0, col0 = index * rows if axis == 0 else 0, index * cols if axis == 1 else 0
    return Box(row0, row0 + rows, col0, col0 + cols)


def _axis(row: Row, spelling: Spelling) -> int | None:
    """What tensor parallelism cuts in this naming."""
    return spelling.tp if isinstance(spelling, OtherAxis) else row.tp


def _rearranged(native: NativeTensor, *, pairs: int = 0, halves: bool = False) -> NativeTensor:
    """The same rows in another order: each head's two halves as pairs of rows, or pairs of rows as two halves."""
    parts = {
        name: tuple(replace(region, pairs=pairs, halves=halves) for region in regions)
        for name, regions in native.parts.items()
    }
    return replace(native, parts=parts)


def _join(name: str, pieces: list[str], boxes: list[Box], groups: int, row: Row, rank: _Rank) -> NativeTensor:
    """Join these parts of the pieces along the rows, group by group."""
    parts: dict[str, tuple[Region, ...]] = {}
    group_rows = sum(box.rows for box in boxes) // groups
    before = padding = 0
    for piece, box in zip(pieces, boxes, strict=True):
        step = box.rows // groups
        if row.padded_vocab:
            padding = min(box.rows, max(0, box.row1 - rank.config.vocab))
            step -= padding
        starts = ((box.row0 + group * step, group * group_rows + before) for group in range(groups))
        parts[piece] = tuple(Region(Box(first, first + step, box.col0, box.col1), at) for first, at in starts if step)
        before += step
    is_vector = " " not in row.shapes[0]
    shape = (sum(box.rows for box in boxes), *(() if is_vector else (boxes[0].cols,)))
    return NativeTensor(name, shape, parts, of_experts=row.of_experts, padding_rows=padding)


def _stack(name: str, shape: Shape | None, pieces: list[list[str]], boxes: list[Box], row: Row) -> NativeTensor:
    """One block of rows [in] per expert (or the only one), its pieces side by side as columns [out]; shape None: as it is."""
    parts: dict[str, tuple[Region, ...]] = {}
    for local_expert, names in enumerate(pieces):
        col = 0
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, local_expert * box.cols, col, transposed=True),)
            col += box.rows
    view = (len(pieces) * boxes[0].cols, sum(box.rows for box in boxes))
    return NativeTensor(name, shape or view, parts, of_experts=row.of_experts, view=view)


def _stack_rows(name: str, pieces: list[list[str]], boxes: list[Box]) -> NativeTensor:
    """[experts, out, in]: one expert under the other, the pieces of each one under the other."""
    parts: dict[str, tuple[Region, ...]] = {}
    row = 0
    for names in pieces:
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, row),)
            row += box.rows
    return NativeTensor(name, (len(pieces), row // len(pieces), boxes[0].cols), parts, of_experts=True)
