"""Tables: how a family's canonical tensors are named, fused and cut in each naming; read in both directions.

    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", ...), tp=0,
        hf="model.layers.{l}.self_attn.{q|k|v}_proj.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"))

A rank's tensor is made by cutting each canonical piece for that rank first and joining the cut pieces after, so that
fused tensors need no tensor-parallel code of their own: all a table yields are rectangles of canonical tensors and
where they lie in native ones. Evaluated in a rank's own sizes (heads / tp, ffn / tp ...) a shape is the rank's shape.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from formats.tensor import Box, Shape, matrix_shape
from megaconv.config import ModelConfig
from megaconv.errors import NotExpressible
from megaconv.layout import Chunk, Layout, divide

NAMINGS = ("hf", "core", "core_local", "legacy", "meta")
"""Hugging Face; Megatron core with Transformer Engine's names, and with those of its local layers; Megatron's models
before core; Meta's own files and Mistral's. Meta's Llama 1 and 2 cut the embedding along another axis than the head;
`meta+rows` is Llama 3, where both are cut by rows.

Megatron's namings may carry how experts are stored: `core+grouped` has one tensor per expert in a grouped layer of
Transformer Engine, `core+legacy_grouped` all of a rank's experts in one; without it each expert is a module of its own.
"""


@dataclass(frozen=True)
class Fused:
    """Several canonical tensors in one native tensor, joined along the rows, group by group.

    With 2 groups q, k, v lie as q0 k0 v0 q1 k1 v1 (the rows of each piece in two halves), with 1 group as q k v.
    """

    name: str
    groups: str = "1"
    """A size (`kv_heads`, a rank's own share under tensor parallelism) or a number."""


@dataclass(frozen=True)
class StackedTransposed:
    """All experts of a rank in one native tensor, each as the transpose of its joined pieces.

    The memory is [experts, in, out]; `shape` is what the tensor is said to be: the same memory under another shape.
    """

    name: str
    shape: str


@dataclass(frozen=True)
class Transposed:
    """Canonical tensors side by side as columns, [in, out]: how GPT-2's Conv1D keeps its weights."""

    name: str


@dataclass(frozen=True)
class RotaryPairs:
    """Canonical tensors whose heads keep the two halves of their rows as pairs, x0 y0 x1 y1 ...: Meta's rotary order."""

    name: str
    members: tuple[int, ...]
    """Which of the row's tensors are kept so (q and k rotate, v doesn't)."""


@dataclass(frozen=True)
class OtherAxis:
    """A tensor that this naming's tensor parallelism cuts along another axis than the row says."""

    name: str
    tp: int


Spelling = str | Fused | StackedTransposed | Transposed | RotaryPairs | OtherAxis


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    canonical: name pattern; `{l}` is the layer, `{e}` an expert, `{q|k|v}` stands for several tensors.
    shapes: one per canonical tensor, in sizes of ModelConfig: `heads*head_dim hidden`.
    tp: the axis that tensor parallelism cuts, None where every rank holds a copy.
    when: the features (see ModelConfig.has) without which the row doesn't exist.
    core_local, grouped, legacy_grouped: where they differ from core. legacy: Megatron's models before core, flattened to
    names with dots. meta: Meta's own files, and Mistral's.
    tied_copy: names under which a tied model's tensor may be stored a second time.
    """

    canonical: str
    shapes: tuple[str, ...]
    hf: Spelling | None
    core: Spelling | None
    core_local: Spelling | None = None
    grouped: Spelling | None = None
    legacy_grouped: Spelling | None = None
    legacy: Spelling | None = None
    meta: Spelling | None = None
    tp: int | None = None
    stage: str = "layer"
    when: str | None = None
    padded_vocab: bool = False
    tied_copy: Mapping[str, str] | None = None

    def spelling(self, naming: str) -> Spelling | None:
        base, _, experts = naming.partition("+")
        choices = {"grouped": self.grouped, "legacy_grouped": self.legacy_grouped, "core_local": self.core_local}
        if base in ("hf", "legacy", "meta"):
            spelling = {"hf": self.hf, "legacy": self.legacy, "meta": self.meta}[base]
            return spelling.name if isinstance(spelling, OtherAxis) and experts == "rows" else spelling
        return choices.get(experts) or choices.get(base) or self.core

    def exists(self, config: ModelConfig, layer: int) -> bool:
        return self.when is None or config.has(self.when, layer)

    @property
    def of_experts(self) -> bool:
        return "{e}" in self.canonical


@dataclass(frozen=True)
class Region:
    """A rectangle of a canonical tensor, and where in the native one its first element lies.

    Untransposed rectangles are as wide as the native tensor. transposed: the rectangle's rows are native columns.
    pairs > 0: rows come in heads of that many, from a head's first row on; the native tensor has row i of a head's first
    half and row i of its second one after the other (Meta's rotary order).
    row_step: how far its rows lie apart in the native tensor; more than 1 only in old files, which are read and not written.
    repeat > 1: the rectangle is a single row that is stored that many times (vocabulary padding).
    """

    box: Box
    row: int
    col: int = 0
    transposed: bool = False
    pairs: int = 0
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
    """A second copy of a tied embedding."""
    of_experts: bool = False
    """Held by one expert-parallel rank, where others hold other experts."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""
    view: tuple[int, int] | None = None
    """The matrix that regions count rows and columns in, where it is not that of the shape."""


def expressible(rows: tuple[Row, ...], naming: str, features: tuple[str, ...] = ()) -> bool:
    """Whether a naming has words for a family's tensors: for those of every model, and of these features."""
    always = (None, "dense", "moe", "untied", *features)
    return all(row.spelling(naming) is not None for row in rows if row.when in always)


def expand(pattern: str) -> tuple[str, ...]:
    """`a.{q|k}.b` -> (`a.q.b`, `a.k.b`); at most one alternative per pattern."""
    match = re.search(r"\{([^{}]*\|[^{}]*)\}", pattern)
    if match is None:
        return (pattern,)
    return tuple(pattern[: match.start()] + word + pattern[match.end() :] for word in match[1].split("|"))


def evaluate(shape: str, sizes: Mapping[str, int]) -> Shape:
    """`kv_heads*head_dim hidden` in numbers."""
    return tuple(
        prod(int(word) if word.isdigit() else sizes[word] for word in axis.split("*")) for axis in shape.split()
    )


def canonical_shapes(rows: tuple[Row, ...], config: ModelConfig) -> dict[str, Shape]:
    """Every canonical tensor of a model with its shape, in model order."""
    sizes, shapes = config.sizes(), {}
    for row, layer in _model_order(rows, config):
        for expert in range(config.experts) if row.of_experts else (0,):
            for name, shape in zip(expand(row.canonical), row.shapes, strict=True):
                shapes[_name(name, layer, expert)] = evaluate(shape, sizes)
    return shapes


def _name(pattern: str, layer: int | None, expert: int | None) -> str:
    return pattern.replace("{l}", str(layer)).replace("{e}", str(expert))


def _model_order(rows: tuple[Row, ...], config: ModelConfig) -> Iterator[tuple[Row, int]]:
    for stage, layers in (("first", range(1)), ("layer", range(config.layers)), ("last", range(1))):
        for layer in layers:
            for row in rows:
                if row.stage == stage and row.exists(config, layer):
                    yield row, layer


def rank_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """The sizes of one tensor-parallel rank's share. Raises LayoutError for what can't be cut."""
    cut = {"heads": layout.tp, "kv_heads": layout.tp}
    if any(config.has("dense", layer) for layer in range(config.layers)):
        cut["ffn"] = layout.tp
    if config.shared_ffn:
        cut["shared_ffn"] = layout.tp
    sizes = config.sizes() | {
        name: divide(getattr(config, name), size, name, "tensor parallel size (tp)") for name, size in cut.items()
    }
    if config.experts:
        sizes["moe_ffn"] = divide(config.moe_ffn, layout.etp, "moe_ffn", "expert tensor parallel size (etp)")
        sizes["local_experts"] = divide(config.experts, layout.ep, "experts", "expert parallel size (ep)")
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
    divide(vocab_rows, layout.tp, "padded vocabulary", "tensor parallel size (tp)")
    whole = config.sizes() | {"vocab": vocab_rows}
    rank = _Rank(config, naming, layout, whole, sizes, tp_rank, tp_rank % layout.etp, ep_rank)
    for row in rows:
        if row.stage == "layer":
            for local in range(chunk.layers):
                if row.exists(config, chunk.first_layer + local):
                    yield from _natives(row, rank, local, chunk.first_layer + local)
        elif row.exists(config, 0):
            if chunk.is_first if row.stage == "first" else chunk.is_last:
                yield from _natives(row, rank, None, 0)
            if row.tied_copy and config.tie_embeddings and chunk.is_last:
                yield _tied_copy(row, rank)


def _tied_copy(row: Row, rank: _Rank) -> NativeTensor:
    assert row.tied_copy is not None
    name = row.tied_copy[rank.naming.partition("+")[0]]
    as_head = replace(row, meta=name) if isinstance(row.meta, OtherAxis) else row
    (native,) = _natives(as_head, rank, None, 0)
    return NativeTensor(name, native.shape, native.parts, tied_copy=True, padding_rows=native.padding_rows)


def _natives(row: Row, rank: _Rank, local_layer: int | None, layer: int) -> Iterator[NativeTensor]:
    spelling = row.spelling(rank.naming)
    if spelling is None:
        raise NotExpressible(f"{row.canonical}: the {rank.naming} naming has no words for {row.when or 'this tensor'}")
    boxes = [_cut(row, spelling, evaluate(shape, rank.whole), rank) for shape in row.shapes]
    experts = rank.experts if row.of_experts else range(1)
    pieces = [[_name(name, layer, expert) for name in expand(row.canonical)] for expert in experts]
    if isinstance(spelling, (StackedTransposed, Transposed)):
        said = evaluate(spelling.shape, rank.sizes) if isinstance(spelling, StackedTransposed) else None
        yield _stack(_name(spelling.name, local_layer, None), said, pieces, boxes, row)
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
            made = _join(_name(native, local_layer, local_expert), joined, their_boxes, groups, row, rank)
            yield _pair_rows(made, rank.config.head_dim) if index in paired else made


def _cut(row: Row, spelling: Spelling, shape: Shape, rank: _Rank) -> Box:
    """The part of a canonical tensor that a rank holds."""
    rows, cols = matrix_shape(shape)
    axis = spelling.tp if isinstance(spelling, OtherAxis) else row.tp
    index, count = (rank.etp_rank, rank.layout.etp) if row.of_experts else (rank.tp_rank, rank.layout.tp)
    over = "expert tensor parallel size (etp)" if row.of_experts else "tensor parallel size (tp)"
    if axis == 0:
        rows = divide(rows, count, f"rows of {row.canonical}", over)
    elif axis == 1:
        cols = divide(cols, count, f"columns of {row.canonical}", over)
    row0, col0 = index * rows if axis == 0 else 0, index * cols if axis == 1 else 0
    return Box(row0, row0 + rows, col0, col0 + cols)


def _pair_rows(native: NativeTensor, head_dim: int) -> NativeTensor:
    """Lay each head's two halves out as pairs of rows."""
    parts = {
        name: tuple(replace(region, pairs=head_dim) for region in regions) for name, regions in native.parts.items()
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
    replicated = row.tp is None
    return NativeTensor(
        name, shape, parts, replicated=replicated, tp=row.tp, of_experts=row.of_experts, padding_rows=padding
    )


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
