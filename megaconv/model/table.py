"""Tables: how a family's canonical tensors are named, fused and sharded in each naming scheme; read in both directions.

    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", ...), tp=0,
        hf="model.layers.{l}.self_attn.{q|k|v}_proj.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"))

What a row comes to on a rank, `natives.py` works out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from formats.tensor import Shape
from megaconv.model.beside import BESIDE, Beside
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.model.naming import KEYS, Naming

STAGES = ("tower", "deepstack", "first", "encoder", "between", "layer", "last", "mtp")
"""Where a row's tensors lie, in the order of the model."""

COPIED_WITH = ("head", "itself", "decoder", "encoder_end", "stacks", "mtp")


@dataclass(frozen=True)
class Separate:
    """Each of a row's tensors in a native tensor of its own; what a plain string stands for.

    A row may have several spellings at once. Those with `members` hold these of the row's tensors (numbers in its order),
    one without them holds all that are left.
    """

    name: str
    members: tuple[int, ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Fused(Separate):
    """Several canonical tensors in one native tensor, joined along the rows, group by group.

    With 2 groups q, k, v lie as q0 k0 v0 q1 k1 v1 (the rows of each piece in two halves), with 1 group as q k v.
    """

    groups: str = "1"
    """A size of the model (`kv_heads`: a rank has its own share of them), or 1."""


@dataclass(frozen=True)
class Stacked(Separate):
    """All experts in one native tensor [experts, out, in], the pieces of each joined along the rows."""


@dataclass(frozen=True)
class StackedTransposed(Separate):
    """All experts of a rank in one native tensor, each as the transpose of its joined pieces.

    The memory is [experts, in, out]; `shape` is what the tensor is said to be: the same memory under another shape.
    """

    shape: str


@dataclass(frozen=True)
class Transposed(Separate):
    """Canonical tensors side by side as columns, [in, out]: how GPT-2's Conv1D keeps its weights."""


@dataclass(frozen=True)
class RotaryPairs(Separate):
    """Canonical tensors whose heads keep the two halves of their rows as pairs, x0 y0 x1 y1 ...: Meta's rotary order."""

    rotating: tuple[int, ...]
    """Which of the row's tensors are kept so (q and k rotate, v doesn't)."""


@dataclass(frozen=True)
class PerHead(Separate):
    """A canonical tensor [heads*rows, cols] with an axis of its own for the heads: [heads, rows, cols]."""

    transposed: bool = False
    """Whether each head is stored as its transpose, [heads, cols, rows]."""


@dataclass(frozen=True)
class Halves(Separate):
    """A canonical tensor whose rows alternate, g0 u0 g1 u1 ..., with every first row above every second one, [g; u]."""


@dataclass(frozen=True)
class Shifted(Separate):
    """A tensor that this naming scheme stores with a number added: norms that multiply with their weight + 1, by -1."""

    by: int


@dataclass(frozen=True)
class RopeLast(Separate):
    """Rows of an indexer's heads, which have those that rotate first, with these at each head's end."""

    halves: bool
    """Whether the second half of those that rotate belongs to the first, so that they become pairs of neighbours."""


@dataclass(frozen=True)
class SecondHalfFirst(Separate):
    """A matrix whose two halves of columns this naming scheme has the other way round."""


@dataclass(frozen=True)
class OtherAxis(Separate):
    """A tensor that this naming scheme's tensor parallelism shards along another axis than the row says."""

    tp: int


Spelling = str | Separate | tuple[str | Separate, ...]


@dataclass(frozen=True)
class Copied:
    """Where a checkpoint has a row's tensor a second time.

    place: `head` (with the head of a model that ties it to the embedding), `itself` (beside the tensor: a second name of one
    and the same), `mtp` (with the MTP layers), or where an encoder has stages of its own: `decoder`
    (with the first stage of the decoder), `encoder_end` (in core, where the encoder ends, and unused there), `stacks` (with
    every stage; each stack computes with its own).
    names: what it is called there, by scheme. Without any, those of the tensor itself.
    """

    place: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.place not in COPIED_WITH:
            raise ValueError(f"{self.place!r} is not a place of a copy; known: {', '.join(COPIED_WITH)}")


@dataclass(frozen=True, eq=False, init=False)
class Row:
    """One line of a family's table.

    canonical: name pattern; `{l}` is the layer (`{l-1}` the one before), `{e}` an expert, `{q|k|v}` stands for several tensors.
    shapes: one per canonical tensor, in sizes of ModelConfig: `heads*head_dim hidden`.
    names: how a naming scheme spells it, by the scheme's keys (`hf=`, `core_local=` ...; see naming.py).
    tp: the axis that tensor parallelism shards, None where every rank holds a copy.
    stage: where it lies, in the order of the model: `tower` and `deepstack` (in each layer of a tower beside a language model, and in each
    part of it that gives to one of the language model's first layers), `first` (with the embedding), `encoder` (in each layer of an
    encoder), `between` (at its end), `layer` (in each layer of the decoder, or of the only stack), `last` (with the head), `mtp` (in
    each MTP layer after it).
    when: the features (see ModelConfig.has) without which the row doesn't exist.
    copies: where checkpoints have the tensor again.
    """

    canonical: str
    shapes: tuple[str, ...]
    names: Mapping[str, tuple[Separate, ...]]
    tp: int | None
    stage: str
    when: str | None
    padded_vocab: bool
    copies: tuple[Copied, ...]

    def __init__(
        self,
        canonical: str,
        shapes: tuple[str, ...],
        *,
        names: Mapping[str, Spelling] | None = None,
        tp: int | None = None,
        stage: str = "layer",
        when: str | None = None,
        padded_vocab: bool = False,
        copies: tuple[Copied, ...] = (),
        **spelled: Spelling,
    ) -> None:
        """spelled: more of `names`. Raises ValueError for what a table can't say."""
        given = {**(names or {}), **spelled}
        values = {
            "canonical": canonical,
            "shapes": shapes,
            "names": {key: _spellings(spelling) for key, spelling in given.items()},
            "tp": tp,
            "stage": stage,
            "when": when,
            "padded_vocab": padded_vocab,
            "copies": copies,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"{self.canonical}: {self.stage!r} is not a stage; known: {', '.join(STAGES)}")
        if len(expand(self.canonical)) != len(self.shapes):
            raise ValueError(f"{self.canonical}: {len(expand(self.canonical))} tensors with {len(self.shapes)} shapes")
        if self.copies and len(self.shapes) > 1:
            raise ValueError(f"{self.canonical}: only a row of one tensor can have copies")
        for key, spellings in self.names.items():
            if key not in KEYS:
                raise ValueError(f"{self.canonical}: {key!r} is not a naming scheme's key; known: {', '.join(KEYS)}")
            held = sorted(number for _, members in self.shared_out(spellings) for number in members)
            if held != list(range(len(self.shapes))):
                raise ValueError(f"{self.canonical}: {key} has to hold each of its tensors once")

    def spelling(self, naming: Naming) -> tuple[Separate, ...]:
        """The native tensors, which share the row's canonical ones out; none where the scheme has no name for them."""
        return next((self.names[key] for key in naming.keys if key in self.names), ())

    def shared_out(self, spellings: tuple[Separate, ...]) -> Iterator[tuple[Separate, tuple[int, ...]]]:
        """(spelling, numbers of the canonical tensors that it holds)."""
        named = {number for spelling in spellings for number in spelling.members or ()}
        for spelling in spellings:
            rest = tuple(number for number in range(len(self.shapes)) if number not in named)
            yield spelling, rest if spelling.members is None else spelling.members

    def renamed(self, **spelled: Spelling) -> "Row":
        """The same row with these names too, or instead."""
        return replace(self, names={**self.names, **{key: _spellings(value) for key, value in spelled.items()}})

    def without(self, *schemes: str) -> "Row":
        """The same row without the names of these schemes."""
        kept = {key: spelling for key, spelling in self.names.items() if key.split("_")[0] not in schemes}
        return replace(self, names=kept)

    def exists(self, config: ModelConfig, layer: int) -> bool:
        return self.when is None or config.has(self.when, layer)

    def copied_with(self, place: str) -> Iterator[Copied]:
        return (copied for copied in self.copies if copied.place == place)

    @property
    def of_experts(self) -> bool:
        return "{e}" in self.canonical


def _spellings(spelling: Spelling) -> tuple[Separate, ...]:
    several = spelling if isinstance(spelling, tuple) else (spelling,)
    return tuple(Separate(one) if isinstance(one, str) else one for one in several)


def expressible(rows: tuple[Row, ...], naming: Naming, features: tuple[str, ...] = ()) -> bool:
    """Whether a naming scheme has names for a family's tensors: for those of every model, and of these features."""
    always = (None, "dense", "moe", "untied", *features)
    return all(row.spelling(naming) for row in rows if row.when in always and row.stage != "mtp")


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


def second_names(rows: tuple[Row, ...], naming: Naming) -> dict[str, str]:
    """Names under which a naming scheme has a tensor again beside itself -> its own name there."""
    return {
        second: spelling.name
        for row in rows
        for copied in row.copied_with("itself")
        for second in copied.names.get(naming.scheme, ())
        for spelling in row.spelling(naming)
    }


def with_beside(rows: tuple[Row, ...], config: ModelConfig) -> tuple[Row, ...]:
    """A family's rows, and those of what lies beside the language model."""
    return rows if config.whole is None else (*rows, *config.whole.tower, *map(_beside, config.whole.tensors))


def _beside(tensor: Beside) -> Row:
    """Names in files may have any characters, but those with which a row's have a meaning."""
    name, hf = BESIDE + tensor.name, BESIDE + tensor.hf
    shape = " ".join(map(str, tensor.shape))
    return Row(name, (shape,), stage="first", hf=Transposed(hf) if tensor.transposed else hf, core=name)


def canonical_shapes(rows: tuple[Row, ...], config: ModelConfig) -> dict[str, Shape]:
    """Every canonical tensor of a model with its shape, in model order."""
    sizes, shapes = config.sizes(), dict[str, Shape]()
    shaped: dict[Row, list[tuple[str, Shape]]] = {}
    experts = [str(expert) for expert in range(sizes["experts"])]
    for row, layer in _model_order(with_beside(rows, config), config):
        if row not in shaped:
            evaluated = (evaluate(shape, sizes) for shape in row.shapes)
            shaped[row] = list(zip(expand(row.canonical), evaluated, strict=True))
        named = [(of_layer(name, layer), shape) for name, shape in shaped[row]]
        if not row.of_experts:
            shapes.update(named)
            continue
        for expert in experts:
            for name, shape in named:
                shapes[name.replace("{e}", expert)] = shape
    return shapes


def of_layer(pattern: str, layer: int) -> str:
    """A name with its layer; `{e}`, the expert, is left in it."""
    return pattern.replace("{l}", str(layer)).replace("{l-1}", str(layer - 1)) if "{l" in pattern else pattern


def _model_order(rows: tuple[Row, ...], config: ModelConfig) -> Iterator[tuple[Row, int]]:
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    for stage in STAGES:
        staged = [row for row in rows if row.stage == stage]
        for _, layer in layers_of(stage, config, whole):
            for row in staged:
                if row.exists(config, config.layer_count - 1 if stage == "mtp" else layer):
                    yield row, layer


def encoder_layers(config: ModelConfig, chunk: Chunk) -> range:
    """Which layers of an encoder a chunk holds: all of them with the embedding, unless it has stages of its own."""
    return range(config.encoder.layers if chunk.is_first else 0) if chunk.encoder is None else chunk.encoder


def layers_of(stage: str, config: ModelConfig, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """(number in the chunk's own names, number in the model) of each layer of a stage that a chunk holds.

    An encoder lies with the embedding unless it has stages of its own. What comes before and after all layers counts as one
    of number 0, and of the number after the last.
    """
    if stage == "layer":
        yield from ((local, chunk.first_layer + local) for local in range(chunk.layers))
    elif stage in ("tower", "deepstack"):
        sizes = {} if config.whole is None else config.whole.sizes
        count = sizes.get("tower_layers" if stage == "tower" else "tower_deepstack", 0)
        yield from ((layer, layer) for layer in range(count) if chunk.is_first)
    elif stage == "encoder":
        yield from enumerate(encoder_layers(config, chunk))
    elif stage == "between":
        ends = chunk.is_first if chunk.encoder is None else chunk.ends_encoder
        yield from [(0, 0)] if ends else []
    elif stage == "mtp":
        yield from ((layer, layer) for layer in range(config.mtp_layers) if chunk.is_last)
    elif stage == "last":
        yield from [(config.layer_count, config.layer_count)] if chunk.is_last else []
    else:
        yield from [(0, 0)] if chunk.is_first else []
