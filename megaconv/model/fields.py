"""A model's configuration by dotted field: splits and rebuilds configurations. `meaning.py` compares them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint
from megaconv.model.beside import Whole
from megaconv.model.ceilings import require_possible
from megaconv.model.config import ModelConfig
from megaconv.model.described import OF_ONE_LAYER, DescribedModel
from megaconv.model.subjects import LayerKind

_SUBJECTS: Mapping[str, type[Any]] = {
    item.name: item.type
    for item in fields(DescribedModel)
    if isinstance(item.type, type) and is_dataclass(item.type)
}
_FIELDS_OF_SUBJECT = {
    subject: {f"{subject}.{item.name}": item.name for item in fields(kind)}
    for subject, kind in _SUBJECTS.items()
}
_NESTED = ("family", "hf", "whole", "own_names", "_features", "layers", *_SUBJECTS)
_OF_LAYERS = {f"layers.{item.name}": item.name for item in fields(LayerKind)}
_FLAT = tuple(item.name for item in fields(ModelConfig) if item.name not in _NESTED)


def _dotted() -> Iterator[str]:
    yield "layers.count"
    yield from _OF_LAYERS
    for names in _FIELDS_OF_SUBJECT.values():
        yield from names
    yield from _FLAT


FIELDS = tuple(_dotted())
"""The dotted names of everything that describes a model, except its family."""
_KNOWN = frozenset(FIELDS)

NOT_COMPUTED = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that don't change the model's computation."""

STRUCTURE = (
    *(
        "layers.count",
        "layers.mixer",
        "layers.mlp",
        *(f"layers.{name}" for name in OF_ONE_LAYER),
        "layers.shares_kv",
        "layers.indexed",
        "layers.entries",
        "layers.hashed",
        "layers.keys_as_values",
        "layers.kv_source",
        "layers.shares_index",
        "layer_scale",
        "hidden",
        "mlp.ffn",
        "mlp.bias",
        "tie_embeddings",
        "token_types",
    ),
    *(
        "attention.heads",
        "attention.kv_heads",
        "attention.head_dim",
        "attention.qkv_bias",
        "attention.o_bias",
    ),
    *(
        "attention.qk_norm",
        "attention.qk_norm_width",
        "attention.qk_norm_bias",
        "attention.o_bias_last",
        "attention.sinks",
        "attention.output_gate",
        "attention.head_gate",
        "attention.gate_bias",
        "attention.differential",
        "attention.sinks_in_windows",
        "attention.v_dim",
        "attention.growing",
        "experts.count",
        "experts.zero",
        "experts.optional",
        "experts.router_width",
        "experts.scored_shared",
        "experts.output_bias",
        "attention.of_experts",
        "experts.vision_ffn",
        "experts.shared_gate",
        "experts.router_bias",
        "experts.latent",
        "experts.latent_norm",
    ),
    *(
        "encoder.layers",
        "encoder.ffn",
        "encoder.heads",
        "retrieval.layers",
        "norm.final",
        "norm.weight",
        "norm.bias",
        "norm.shared",
        "norm.embedding",
        "norm.skips_first",
        "norm.after_experts",
        "norm.inner",
        "norm.gate_rank",
        "latent.gated",
        "head.binary",
        "head.classes",
        "head.choices",
        "head.pooler",
        "head.labels",
        "head.unpredicted",
        "positions.buckets",
        "positions.by_layer",
        "attention.kept_keys",
        "weighted_residuals",
        "affine_residuals",
        "sublayer_conv",
        "stored_scales",
        "positions.offset",
        "positions.scaled_frequencies",
    ),
    *("retriever.towers", "retriever.projection", "retriever.pooler"),
    *("latent.kv_rank", "latent.q_rank", "latent.rope_dim", "latent.v_dim"),
    *(
        "block_indexer.heads",
        "block_indexer.head_dim",
        "hyper.streams",
        "hyper.rank",
        "hyper.mixes",
        "hyper.learned_head",
    ),
    *("layers.ngram_rows", "ngrams.size", "ngrams.heads", "ngrams.width", "ngrams.conv"),
    *("compressed.q_rank", "compressed.out_groups", "compressed.out_rank", "compressed.short"),
    *("relative.width", "relative.extent"),
    *("convolved.channels", "convolved.heads"),
    *("compressed.long", "compressed.index_heads", "compressed.index_dim"),
    *(
        "indexer.heads",
        "indexer.head_dim",
        "indexer.from_hidden",
        "indexer.pool",
        "experts.own_norms",
    ),
    *("layer_inputs.width", "layer_inputs.vocab", "streams.count", "streams.laurel_rank"),
    *(
        "linear.key_heads",
        "linear.value_heads",
        "linear.key_dim",
        "linear.value_dim",
        "linear.conv",
        "linear.full_rank_out_gate",
    ),
    *("mamba.heads", "mamba.head_dim", "mamba.groups", "mamba.state", "mamba.norm"),
    *("mamba1.width", "mamba1.state", "mamba1.conv", "mamba1.rank", "mamba1.heads", "mamba1.bias"),
    *("mamba1.conv_bias", "mamba1.norms"),
    *("recurrent.head_dim", "recurrent.conv"),
    *("layers.block", "blocks.count", "blocks.adapter_rank", "blocks.attention_adapters"),
    "convolution.width",
    "recurrence.high",
)
"""Fields that decide the names and shapes of tensors. Two descriptions of one checkpoint have to agree on these."""


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """All fields that describe a model, by dotted name."""
    found = {"layers.count": config.layer_count, **_columns(config)}
    for subject, names in _FIELDS_OF_SUBJECT.items():
        part = getattr(config, subject)
        for name, inner in names.items():
            found[name] = getattr(part, inner)
    for name in _FLAT:
        found[name] = getattr(config, name)
    return found


def _columns(config: ModelConfig) -> dict[str, Any]:
    """The fields of layers, by dotted name: one value if all layers agree, else a tuple with one for each."""
    first = config.layers[0]
    if all(kind == first for kind in config.layers[1:]):
        return {name: getattr(first, inner) for name, inner in _OF_LAYERS.items()}
    return {
        name: one_or_each(tuple(getattr(kind, inner) for kind in config.layers))
        for name, inner in _OF_LAYERS.items()
    }


def from_fields(
    family: str,
    values: Mapping[str, Any],
    hf: Mapping[str, Any] | None = None,
    whole: Whole | None = None,
) -> ModelConfig:
    """Build a model from its fields by dotted name. Missing fields have their defaults.

    `layers.count` is the number of layers. Each other field of layers is one value for all layers, or a tuple with one
    for each. Raises CorruptCheckpoint for values that no model has, and TypeError for unknown fields and for missing
    fields without a default.
    """
    _require_known(values)
    require_possible(values)
    grouped, flat = _grouped(values)
    subjects = {subject: kind(**grouped.get(subject, {})) for subject, kind in _SUBJECTS.items()}
    return ModelConfig(
        family=family,
        layers=_layers(values),
        hf=hf,
        whole=whole,
        **flat,
        **subjects,
    )


def _require_known(values: Mapping[str, Any]) -> None:
    unknown = values.keys() - _KNOWN
    if unknown:
        raise TypeError(f"a model has no {', '.join(sorted(unknown))}")


def _grouped(values: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(the values of each subject, the values without a subject), without those of layers."""
    grouped: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        subject, _, inner = name.rpartition(".")
        if not subject:
            flat[inner] = value
        elif subject != "layers":
            grouped.setdefault(subject, {})[inner] = value
    return grouped, flat


def _layers(values: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    count = values["layers.count"]
    if type(count) is not int or count < 1:
        raise CorruptCheckpoint(f"the model's layers should be a positive number, found {count!r}")
    columns = {inner: values[name] for name, inner in _OF_LAYERS.items() if name in values}
    for inner, column in columns.items():
        if isinstance(column, tuple) and len(column) != count:
            raise CorruptCheckpoint(
                f"the model has {counted(count, 'layer')}, and layers.{inner} is about {len(column)}"
            )
    return tuple(
        LayerKind(
            **{
                name: column[layer] if isinstance(column, tuple) else column
                for name, column in columns.items()
            }
        )
        for layer in range(count)
    )


def changed(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """The same model with other values of some fields, by dotted name."""
    _require_known(values)
    whole = {**fields_of(config), **values}
    require_possible(whole)
    grouped, parts = _grouped(values)
    for subject, of_subject in grouped.items():
        parts[subject] = replace(getattr(config, subject), **of_subject)
    if any(name.startswith("layers.") for name in values):
        parts["layers"] = _layers(whole)
    return replace(config, **parts)


def per_layer(layers: Iterable[int], count: int, inside: Any, outside: Any) -> Any:
    """A field of layers that has one value in the listed layers and another value in the rest."""
    chosen = set(layers)
    return one_or_each(tuple(inside if layer in chosen else outside for layer in range(count)))


def one_or_each(values: tuple[Any, ...]) -> Any:
    """A field of layers: one value if all layers have the same, else the tuple of values."""
    return values[0] if len(set(values)) == 1 else values
