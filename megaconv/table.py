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
from dataclasses import dataclass
from math import prod

from formats.tensor import Box, Shape, matrix_shape
from megaconv.config import ModelConfig
from megaconv.errors import NotExpressible
from megaconv.layout import Chunk, Layout, divide

NAMINGS = ("hf", "core", "core_local")
"""Hugging Face; Megatron core with Transformer Engine's names; Megatron core with those of its local layers."""


@dataclass(frozen=True)
class Fused:
    """Several canonical tensors in one native tensor, joined along the rows, group by group.

    With 2 groups q, k, v lie as q0 k0 v0 q1 k1 v1 (the rows of each piece in two halves), with 1 group as q k v.
    """

    name: str
    groups: str = "1"
    """A size (`kv_heads`, a rank's own share under tensor parallelism) or a number."""


Spelling = str | Fused


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    canonical: name pattern; `{l}` is the layer, `{q|k|v}` stands for several tensors.
    shapes: one per canonical tensor, in sizes of ModelConfig: `heads*head_dim hidden`.
    tp: the axis that tensor parallelism cuts, None where every rank holds a copy.
    when: the flag of ModelConfig without which the row doesn't exist.
    core_local: where it differs from core.
    tied_copy: names under which a tied model's tensor may be stored a second time.
    """

    canonical: str
    shapes: tuple[str, ...]
    hf: Spelling | None
    core: Spelling | None
    core_local: Spelling | None = None
    tp: int | None = None
    stage: str = "layer"
    when: str | None = None
    padded_vocab: bool = False
    tied_copy: Mapping[str, str] | None = None

    def spelling(self, naming: str) -> Spelling | None:
        if naming == "core_local" and self.core_local is not None:
            return self.core_local
        return self.hf if naming == "hf" else self.core

    def names(self, pattern: str) -> tuple[str, ...]:
        """The pattern with `{a|b}` written out; `{l}` stays."""
        return expand(pattern)

    def exists(self, config: ModelConfig) -> bool:
        return self.when is None or bool(getattr(config, self.when))


@dataclass(frozen=True)
class Region:
    """A rectangle of a canonical tensor, and the native row where its first row lies (its columns fill the native ones).

    repeat > 1: the rectangle is a single row that is stored that many times (vocabulary padding).
    """

    box: Box
    row: int
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
    tied_copy: bool = False
    """A second copy of a tied embedding."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""


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
        for name, shape in zip(expand(row.canonical), row.shapes, strict=True):
            shapes[name.replace("{l}", str(layer))] = evaluate(shape, sizes)
    return shapes


def _model_order(rows: tuple[Row, ...], config: ModelConfig) -> Iterator[tuple[Row, int]]:
    present = [row for row in rows if row.exists(config)]
    for row in present:
        if row.stage == "first":
            yield row, 0
    for layer in range(config.layers):
        for row in present:
            if row.stage == "layer":
                yield row, layer
    for row in present:
        if row.stage == "last":
            yield row, 0


def rank_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """The sizes of one tensor-parallel rank's share. Raises LayoutError for what can't be cut."""
    over = "tensor parallel size (tp)"
    return config.sizes() | {
        name: divide(getattr(config, name), layout.tp, name, over) for name in ("heads", "kv_heads", "ffn")
    }


def native_tensors(
    rows: tuple[Row, ...], config: ModelConfig, naming: str, layout: Layout, tp_rank: int, chunk: Chunk, vocab_rows: int
) -> Iterator[NativeTensor]:
    """What one tensor-parallel rank holds of one chunk. vocab_rows: of the whole vocabulary, padding included.

    Layers in names count from 0 in each chunk, as Megatron has it. The second copy of a tied embedding is named with the
    last chunk; whether it is really there is for the caller to say.
    """
    sizes = rank_sizes(config, layout)
    sizes["vocab"] = divide(vocab_rows, layout.tp, "padded vocabulary", "tensor parallel size (tp)")
    for row in rows:
        if not row.exists(config):
            continue
        if row.spelling(naming) is None:
            raise NotExpressible(f"{row.canonical}: the {naming} naming has no words for {row.when or 'this tensor'}")
        if row.stage == "first":
            if chunk.is_first:
                yield from _natives(row, config, naming, sizes, tp_rank, None, 0)
            if chunk.is_last and config.tie_embeddings and row.tied_copy:
                yield _tied_copy(row, config, naming, sizes, tp_rank)
        elif row.stage == "last":
            if chunk.is_last:
                yield from _natives(row, config, naming, sizes, tp_rank, None, 0)
        else:
            for local in range(chunk.layers):
                yield from _natives(row, config, naming, sizes, tp_rank, local, chunk.first_layer + local)


def _tied_copy(row: Row, config: ModelConfig, naming: str, sizes: Mapping[str, int], tp_rank: int) -> NativeTensor:
    (native,) = _natives(row, config, naming, sizes, tp_rank, None, 0)
    assert row.tied_copy is not None
    return NativeTensor(
        row.tied_copy[naming], native.shape, native.parts, tied_copy=True, padding_rows=native.padding_rows
    )


def _natives(
    row: Row,
    config: ModelConfig,
    naming: str,
    sizes: Mapping[str, int],
    tp_rank: int,
    local_layer: int | None,
    layer: int,
) -> Iterator[NativeTensor]:
    pieces = [name.replace("{l}", str(layer)) for name in expand(row.canonical)]
    shapes = [evaluate(shape, sizes) for shape in row.shapes]
    spelling = row.spelling(naming)
    assert spelling is not None
    if isinstance(spelling, Fused):
        groups = evaluate(spelling.groups, sizes)[0]
        members = [(spelling.name, list(range(len(pieces))), groups)]
    else:
        members = [(name, [index], 1) for index, name in enumerate(expand(spelling))]
    for name, indices, groups in members:
        yield _join(
            name.replace("{l}", str(local_layer)),
            [pieces[i] for i in indices],
            [shapes[i] for i in indices],
            groups,
            row,
            config.vocab,
            tp_rank,
        )


def _join(
    name: str, pieces: list[str], shapes: list[Shape], groups: int, row: Row, vocab: int, tp_rank: int
) -> NativeTensor:
    """Join pieces of these (rank-local) shapes, group by group."""
    parts: dict[str, tuple[Region, ...]] = {}
    heights = [matrix_shape(shape)[0] for shape in shapes]
    group_rows = sum(heights) // groups
    before = padding = 0
    for piece, shape, height in zip(pieces, shapes, heights, strict=True):
        rows, cols = matrix_shape(shape)
        row0 = tp_rank * rows if row.tp == 0 else 0
        col0 = tp_rank * cols if row.tp == 1 else 0
        step = height // groups
        regions = [
            Region(Box(row0 + g * step, row0 + (g + 1) * step, col0, col0 + cols), g * group_rows + before)
            for g in range(groups)
        ]
        if row.padded_vocab:
            padding = min(rows, max(0, row0 + rows - vocab))
            regions = [Region(Box(row0, row0 + rows - padding, col0, col0 + cols), 0)] if padding < rows else []
        parts[piece] = tuple(regions)
        before += step
    shape = (sum(heights), *shapes[0][1:])
    return NativeTensor(name, shape, parts, replicated=row.tp is None, padding_rows=padding)
