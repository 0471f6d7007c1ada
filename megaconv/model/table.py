"""Tables: how a family's canonical tensors are named, fused and cut in each naming; read in both directions.

    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", ...), tp=0,
        hf="model.layers.{l}.self_attn.{q|k|v}_proj.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"))

What a row comes to on a rank, `natives.py` works out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from formats.tensor import Shape
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk

NAMINGS = ("hf", "core", "core_local", "legacy", "meta")
"""Hugging Face; Megatron core with Transformer Engine's names, and with those of its local layers; Megatron's models
before core; Meta's own files and Mistral's. Meta's Llama 1 and 2 cut the embedding along another axis than the head;
`meta+rows` is Llama 3, where both are cut by rows.

Hugging Face's experts are modules of their own in files; `hf+stacked` has all of a layer's in one tensor, as transformers 5
holds them in memory, and writes them when it is told not to keep the older form.

Megatron's namings may carry how experts are stored: `core+grouped` has one tensor per expert in a grouped layer of
Transformer Engine, `core+legacy_grouped` all of a rank's experts in one; without it each expert is a module of its own.
"""


STAGES = ("first", "encoder", "between", "layer", "last", "mtp")
"""Where a row's tensors lie, in the order of the model."""


@dataclass(frozen=True)
class Fused:
    """Several canonical tensors in one native tensor, joined along the rows, group by group.

    With 2 groups q, k, v lie as q0 k0 v0 q1 k1 v1 (the rows of each piece in two halves), with 1 group as q k v.
    """

    name: str
    groups: str = "1"
    """A size (`kv_heads`, a rank's own share under tensor parallelism) or a number."""


@dataclass(frozen=True)
class Stacked:
    """All experts in one native tensor [experts, out, in], the pieces of each joined along the rows."""

    name: str


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
class Halves:
    """A canonical tensor whose rows alternate, g0 u0 g1 u1 ..., with every first row above every second one, [g; u]."""

    name: str


@dataclass(frozen=True)
class OtherAxis:
    """A tensor that this naming's tensor parallelism cuts along another axis than the row says."""

    name: str
    tp: int


Spelling = str | Fused | Stacked | StackedTransposed | Transposed | RotaryPairs | Halves | OtherAxis


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    canonical: name pattern; `{l}` is the layer (`{l-1}` the one before), `{e}` an expert, `{q|k|v}` stands for several tensors.
    shapes: one per canonical tensor, in sizes of ModelConfig: `heads*head_dim hidden`.
    tp: the axis that tensor parallelism cuts, None where every rank holds a copy.
    stage: where it lies, in the order of the model: `first` (with the embedding), `encoder` (in each layer of an encoder), `between`
    (at its end), `layer` (in each layer of the decoder, or of the only stack), `last` (with the head), `mtp` (in each
    layer after it that predicts further tokens).
    when: the features (see ModelConfig.has) without which the row doesn't exist.
    core_local, grouped, legacy_grouped: where they differ from core; stacked: where it differs from hf. legacy: Megatron's
    models before core, flattened to names with dots. meta: Meta's own files, and Mistral's.
    tied_copy: names, by naming, under which a tied model's tensor may be stored again, where stages are apart.
    aliases: names, by naming, under which it is stored again: always by Megatron, now and then by Hugging Face.
    mtp_copy: names under which it is stored again beside the layers that predict further tokens.
    repeated: where else Megatron has it when an encoder has stages of its own: `decoder` (with the first stage of the
    decoder, as the embedding), `idle` (core alone: where the encoder ends, for nothing, as the head), `everywhere` (each
    stage computes with those of its own stack).
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
    stacked: Spelling | None = None
    tp: int | None = None
    stage: str = "layer"
    when: str | None = None
    padded_vocab: bool = False
    tied_copy: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mtp_copy: Mapping[str, str] | None = None
    repeated: str | None = None

    def spelling(self, naming: str) -> Spelling | None:
        base, _, experts = naming.partition("+")
        choices = {"grouped": self.grouped, "legacy_grouped": self.legacy_grouped, "core_local": self.core_local}
        if experts == "stacked":
            return self.stacked or self.hf
        if base in ("hf", "legacy", "meta"):
            spelling = {"hf": self.hf, "legacy": self.legacy, "meta": self.meta}[base]
            return spelling.name if isinstance(spelling, OtherAxis) and experts == "rows" else spelling
        return choices.get(experts) or choices.get(base) or self.core

    def exists(self, config: ModelConfig, layer: int) -> bool:
        return self.when is None or config.has(self.when, layer)

    @property
    def of_experts(self) -> bool:
        return "{e}" in self.canonical


def expressible(rows: tuple[Row, ...], naming: str, features: tuple[str, ...] = ()) -> bool:
    """Whether a naming has words for a family's tensors: for those of every model, and of these features."""
    always = (None, "dense", "moe", "untied", *features)
    return all(row.spelling(naming) is not None for row in rows if row.when in always and row.stage != "mtp")


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


def second_names(rows: tuple[Row, ...], naming: str) -> dict[str, str]:
    """Names under which a naming has a tensor again -> its own name there."""
    base = naming.partition("+")[0]
    return {
        alias: spelling if isinstance(spelling, str) else spelling.name
        for row in rows
        for alias in row.aliases.get(base, ())
        if (spelling := row.spelling(naming)) is not None
    }


def canonical_shapes(rows: tuple[Row, ...], config: ModelConfig) -> dict[str, Shape]:
    """Every canonical tensor of a model with its shape, in model order."""
    sizes, shapes = config.sizes(), {}
    for row, layer in _model_order(rows, config):
        for expert in range(config.experts.count) if row.of_experts else (0,):
            for name, shape in zip(expand(row.canonical), row.shapes, strict=True):
                shapes[fill(name, layer, expert)] = evaluate(shape, sizes)
    return shapes


def fill(pattern: str, layer: int, expert: int | None) -> str:
    """A name with its layer and its expert."""
    return pattern.replace("{l}", str(layer)).replace("{l-1}", str(layer - 1)).replace("{e}", str(expert))


def _model_order(rows: tuple[Row, ...], config: ModelConfig) -> Iterator[tuple[Row, int]]:
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    for stage in STAGES:
        for _, layer in layers_of(stage, config, whole):
            for row in rows:
                if row.stage == stage and row.exists(config, config.layer_count - 1 if stage == "mtp" else layer):
                    yield row, layer


def layers_of(stage: str, config: ModelConfig, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """(number in the chunk's own names, number in the model) of each layer of a stage that a chunk holds.

    An encoder lies with the embedding unless it has stages of its own. What comes before and after all layers counts as one
    of number 0, and of the number after the last.
    """
    if stage == "layer":
        yield from ((local, chunk.first_layer + local) for local in range(chunk.layers))
    elif stage == "encoder":
        together = range(config.encoder.layers if chunk.is_first else 0)
        yield from enumerate(together if chunk.encoder is None else chunk.encoder)
    elif stage == "between":
        ends = chunk.is_first if chunk.encoder is None else chunk.ends_encoder
        yield from [(0, 0)] if ends else []
    elif stage == "mtp":
        yield from ((layer, layer) for layer in range(config.mtp_layers) if chunk.is_last)
    elif stage == "last":
        yield from [(config.layer_count, config.layer_count)] if chunk.is_last else []
    else:
        yield from [(0, 0)] if chunk.is_first else []
