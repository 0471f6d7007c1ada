"""Tables: how each naming scheme names, fuses and shards a family's canonical tensors. Loaders and savers use the same
table.

    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", ...), tp=0,
        hf="model.layers.{l}.self_attn.{q|k|v}_proj.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"))

Families import everything that a table is written with from here: `Row`, `Copied` and the spellings. `natives.py`
computes the native tensors of a row on each rank.
"""

from collections.abc import Iterator

from formats.tensor import Shape
from megaconv.model.beside import BESIDE, Beside
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.model.naming import Naming
from megaconv.model.patterns import evaluate, expand, of_layer
from megaconv.model.rows import STAGES, Copied, Row, Spelling
from megaconv.model.spellings.as_vector import AsVector
from megaconv.model.spellings.fused import Fused
from megaconv.model.spellings.halves import Halves
from megaconv.model.spellings.head_pairs import HeadPairs
from megaconv.model.spellings.last_rows_apart import LastRowsApart
from megaconv.model.spellings.other_axis import OtherAxis
from megaconv.model.spellings.per_head import PerHead
from megaconv.model.spellings.rope_last import RopeLast
from megaconv.model.spellings.rotary_pairs import FusedPairs, RotaryPairs
from megaconv.model.spellings.row_parts import RowParts
from megaconv.model.spellings.second_half_first import SecondHalfFirst
from megaconv.model.spellings.separate import Separate
from megaconv.model.spellings.shifted import Shifted
from megaconv.model.spellings.stacked import Stacked
from megaconv.model.spellings.transposed import StackedTransposed, Transposed

__all__ = [
    "AsVector",
    "Copied",
    "Fused",
    "FusedPairs",
    "Halves",
    "HeadPairs",
    "LastRowsApart",
    "OtherAxis",
    "PerHead",
    "RopeLast",
    "RotaryPairs",
    "Row",
    "RowParts",
    "SecondHalfFirst",
    "Separate",
    "Shifted",
    "Spelling",
    "Stacked",
    "StackedTransposed",
    "Transposed",
    "canonical_axes",
    "canonical_shapes",
    "encoder_layers",
    "expand",
    "expressible",
    "layers_of",
    "second_names",
    "with_beside",
]


def expressible(rows: tuple[Row, ...], naming: Naming, features: tuple[str, ...] = ()) -> bool:
    """True if a naming scheme has names for the tensors that every model of a family has, and for those of these
    features."""
    always = (None, "dense", "moe", "untied", "separate_towers", *features)
    return all(row.spelling(naming) for row in rows if row.when in always and row.stage != "mtp")


def second_names(rows: tuple[Row, ...], naming: Naming) -> dict[str, str]:
    """Second names of tensors in a naming scheme -> their own names there."""
    found: dict[str, str] = {}
    for row in rows:
        for copied in row.copied_with("itself"):
            for second in copied.names.get(naming.scheme, ()):
                for spelling in row.spelling(naming):
                    found[second] = spelling.name
    return found


def with_beside(rows: tuple[Row, ...], config: ModelConfig) -> tuple[Row, ...]:
    """A family's rows, plus the rows of tensors that no family lists: the multimodal parts outside the language model,
    or all tensors of a model without a family."""
    if config.own_names is not None:
        return (*rows, *config.own_names.rows)
    if config.whole is None:
        return rows
    return (*rows, *config.whole.tower, *map(_beside, config.whole.tensors))


def _beside(tensor: Beside) -> Row:
    """The row of one tensor outside the language model. Its names must not contain the characters of patterns: `{`, `}`
    and `|`."""
    name, hf = BESIDE + tensor.name, BESIDE + tensor.hf
    shape = " ".join(map(str, tensor.shape))
    spelling = Transposed(hf) if tensor.transposed else hf
    return Row(name, (shape,), stage="first", hf=spelling, core=name)


def canonical_shapes(rows: tuple[Row, ...], config: ModelConfig) -> dict[str, Shape]:
    """The shape of every canonical tensor of a model, in model order."""
    sizes = config.sizes()
    shapes: dict[str, Shape] = {}
    # Each row is evaluated once for all layers of equal sizes.
    shaped: dict[tuple[Row, tuple[tuple[str, int], ...]], list[tuple[str, Shape]]] = {}
    experts = [str(expert) for expert in range(sizes["experts"])]
    for row, layer in _model_order(with_beside(rows, config), config):
        own = config.layer_sizes(layer) if row.stage == "layer" else {}
        key = row, tuple(own.items())
        if key not in shaped:
            evaluated = (evaluate(shape, sizes | own) for shape in row.shapes)
            shaped[key] = list(zip(expand(row.canonical), evaluated, strict=True))
        named = [(of_layer(name, layer), shape) for name, shape in shaped[key]]
        if not row.of_experts:
            shapes.update(named)
            continue
        for expert in experts:
            for name, shape in named:
                shapes[name.replace("{e}", expert)] = shape
    return shapes


def canonical_axes(rows: tuple[Row, ...], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The axes of every canonical tensor of a model in its sizes, such as `("ffn", "hidden")`, in model order."""
    experts = [str(expert) for expert in range(config.experts.count)]
    found: dict[str, tuple[str, ...]] = {}
    for row, layer in _model_order(with_beside(rows, config), config):
        for pattern, shape in zip(expand(row.canonical), row.shapes, strict=True):
            name, axes = of_layer(pattern, layer), tuple(shape.split())
            names = (
                [name.replace("{e}", expert) for expert in experts] if row.of_experts else [name]
            )
            found |= dict.fromkeys(names, axes)
    return found


def _model_order(rows: tuple[Row, ...], config: ModelConfig) -> Iterator[tuple[Row, int]]:
    whole = Chunk.of_whole_model(config.layer_count)
    for stage in STAGES:
        staged = [row for row in rows if row.stage == stage]
        for _, layer in layers_of(stage, config, whole):
            # MTP layers have the features of the last layer.
            described_by = config.layer_count - 1 if stage == "mtp" else layer
            yield from ((row, layer) for row in staged if row.exists(config, described_by))


def encoder_layers(config: ModelConfig, chunk: Chunk) -> range:
    """The encoder layers of a chunk. The chunk with the embedding holds all of them, unless the encoder has its
    own stages."""
    if chunk.encoder is not None:
        return chunk.encoder
    return range(config.encoder.layers if chunk.is_first else 0)


def layers_of(stage: str, config: ModelConfig, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield (number in the chunk's own names, number in the model) for each layer of a stage that a chunk holds.

    Encoder layers are with the embedding unless the encoder has its own stages. Retro's encoder always is. A stage
    before all layers counts as one layer of number 0. A stage after all layers counts as one layer, with the number after the last.
    """
    if stage != "last":
        yield from enumerate(_numbers(stage, config, chunk))
    elif chunk.is_last:
        yield config.layer_count, config.layer_count


def _numbers(stage: str, config: ModelConfig, chunk: Chunk) -> range:
    """The numbers in the model of the layers of a stage that a chunk holds."""
    if stage == "layer":
        return range(chunk.first_layer, chunk.first_layer + chunk.layers)
    if stage == "encoder":
        return encoder_layers(config, chunk)
    if stage == "between":
        ends_encoder = chunk.is_first if chunk.encoder is None else chunk.ends_encoder
        return range(1 if ends_encoder else 0)
    if stage == "mtp":
        return range(config.mtp_layers if chunk.is_last else 0)
    if not chunk.is_first:
        return range(0)
    if stage == "retriever":
        return range(config.retrieval.layers)
    if stage in ("tower", "deepstack"):
        sizes = {} if config.whole is None else config.whole.sizes
        return range(sizes.get("tower_layers" if stage == "tower" else "tower_deepstack", 0))
    return range(1)
