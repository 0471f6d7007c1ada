"""A model's configuration by dotted field: splits, rebuilds and compares configurations."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible, TensorMismatch
from megaconv.model.beside import Whole
from megaconv.model.ceilings import require_possible
from megaconv.model.config import OF_ONE_LAYER, SIZES, ModelConfig, value_of
from megaconv.model.mixers import (
    BlockIndexer,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Mamba,
    ShortConvolution,
)
from megaconv.model.subjects import (
    MLP,
    Attention,
    Encoder,
    Experts,
    Factors,
    Head,
    HyperConnections,
    LayerInputs,
    LayerKind,
    Norm,
    Positions,
    Retrieval,
    Retriever,
    Streams,
    Temperature,
)

_SUBJECTS: Mapping[str, type[Any]] = {
    "attention": Attention,
    "mlp": MLP,
    "norm": Norm,
    "positions": Positions,
    "temperature": Temperature,
    "latent": LatentAttention,
    "indexer": Indexer,
    "block_indexer": BlockIndexer,
    "compressed": CompressedAttention,
    "linear": LinearAttention,
    "mamba": Mamba,
    "convolution": ShortConvolution,
    "factors": Factors,
    "experts": Experts,
    "layer_inputs": LayerInputs,
    "streams": Streams,
    "hyper": HyperConnections,
    "encoder": Encoder,
    "retrieval": Retrieval,
    "head": Head,
    "retriever": Retriever,
}
_NESTED = ("family", "hf", "whole", "own_names", "_features", "layers", *_SUBJECTS)
_OF_LAYERS = tuple(item.name for item in fields(LayerKind))


def _dotted() -> Iterator[str]:
    yield "layers.count"
    yield from (f"layers.{name}" for name in _OF_LAYERS)
    for subject, kind in _SUBJECTS.items():
        yield from (f"{subject}.{item.name}" for item in fields(kind))
    yield from (item.name for item in fields(ModelConfig) if item.name not in _NESTED)


FIELDS = tuple(_dotted())
"""The dotted names of everything that describes a model, except its family."""

_OF_FILES = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of a config.json about its files instead of its model."""
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
        "attention.sinks_in_windows",
        "attention.v_dim",
        "experts.count",
        "experts.vision_ffn",
        "experts.shared_gate",
        "experts.router_bias",
        "experts.latent",
        "experts.latent_norm",
    ),
    *(
        "encoder.layers",
        "retrieval.layers",
        "norm.final",
        "norm.weight",
        "norm.bias",
        "norm.shared",
        "norm.embedding",
        "norm.after_experts",
        "norm.inner",
        "norm.gate_rank",
        "latent.gated",
        "head.binary",
        "head.classes",
        "head.choices",
        "head.unpredicted",
        "positions.buckets",
        "positions.offset",
    ),
    *("retriever.towers", "retriever.projection", "retriever.pooler"),
    *("latent.kv_rank", "latent.q_rank", "latent.rope_dim", "latent.v_dim"),
    *("block_indexer.heads", "block_indexer.head_dim", "hyper.streams"),
    *("compressed.q_rank", "compressed.out_groups", "compressed.out_rank", "compressed.short"),
    *("compressed.long", "compressed.index_heads", "compressed.index_dim"),
    *("indexer.heads", "indexer.head_dim", "experts.own_norms"),
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
    "convolution.width",
)
"""Fields that decide the names and shapes of tensors. Two descriptions of one checkpoint have to agree on these."""


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """All fields that describe a model, by dotted name."""
    return {name: value_of(config, name) for name in FIELDS}


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
    unknown = values.keys() - set(FIELDS)
    if unknown:
        raise TypeError(f"a model has no {', '.join(sorted(unknown))}")
    require_possible(values)
    grouped: dict[str, dict[str, Any]] = {subject: {} for subject in _SUBJECTS}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        subject, _, inner = name.rpartition(".")
        if subject in grouped:
            grouped[subject][inner] = value
        elif not subject:
            flat[inner] = value
    subjects = {subject: kind(**grouped[subject]) for subject, kind in _SUBJECTS.items()}
    return ModelConfig(
        family=family,
        layers=_layers(values),
        hf=hf,
        whole=whole,
        **flat,
        **subjects,
    )


def _layers(values: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    count = values["layers.count"]
    if type(count) is not int or count < 1:
        raise CorruptCheckpoint(f"the model's layers should be a positive number, found {count!r}")
    columns = {name: values[f"layers.{name}"] for name in _OF_LAYERS if f"layers.{name}" in values}
    for name, column in columns.items():
        if isinstance(column, tuple) and len(column) != count:
            raise CorruptCheckpoint(
                f"the model has {count} layers, and layers.{name} is about {len(column)}"
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
    new = from_fields(config.family, fields_of(config) | dict(values), config.hf, config.whole)
    return replace(new, own_names=config.own_names)


def per_layer(layers: Iterable[int], count: int, inside: Any, outside: Any) -> Any:
    """A field of layers that has one value in the listed layers and another value in the rest."""
    chosen = set(layers)
    return one_or_each(tuple(inside if layer in chosen else outside for layer in range(count)))


def one_or_each(values: tuple[Any, ...]) -> Any:
    """A field of layers: one value if all layers have the same, else the tuple of values."""
    return values[0] if len(set(values)) == 1 else values


def meaning_of(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model that have an effect, each in one normal form.

    A field is left out if another field makes it meaningless. One group of experts counts as no groups, and a factor of
    1 on the experts' weights counts as no factor. The width of dense layers counts only if there are dense layers.
    """
    values = fields_of(config)
    values["positions.scaling"] = _full_scaling(config)
    values |= {f"layers.{name}": _own(config, name) for name in OF_ONE_LAYER}
    if not config.experts.count:
        values["layers.mlp"] = one_or_each(
            tuple("none" if kind.mlp == "none" else "dense" for kind in config.layers)
        )
    without_effect = {*_without_effect(config)}
    # A value that equals its absence becomes None.
    for name in _NONE_IF_ONE & without_effect:
        values[name] = None
    return {
        name: value for name, value in values.items() if name not in without_effect - _NONE_IF_ONE
    }


def _own(config: ModelConfig, size: str) -> Any:
    """The field of layers with the sizes of their own. A layer that repeats the model's size has none, and a layer
    without the part that has this size has none either."""
    usual = SIZES[size].of(config)
    found = []
    for kind in config.layers:
        has_part = kind.mlp != "none" if size == "ffn" else kind.mixer == "attention"
        own = getattr(kind, size) if has_part else None
        found.append(None if own == usual else own)
    return one_or_each(tuple(found))


_NONE_IF_ONE = frozenset({"experts.groups", "experts.group_topk", "experts.scale"})
"""Fields that mean the same with 1 as without a value."""


def _without_effect(config: ModelConfig) -> Iterator[str]:
    """The names of the fields that have no effect on the model, because of the values of other fields."""
    experts, positions = config.experts, config.positions
    # Each library uses its own value and ignores the configuration. The families' notices say so.
    yield "latent.norm_epsilon"
    yield "mamba.least_time_step"
    yield "linear.stored_decays"
    if not config.has("rope"):
        kept = ("positions.theta",) if positions.kind == "sinusoidal" else ()
        yield from (name for name in _OF_ROPE if name not in kept)
    if not config.attention.qk_norm:
        yield from (f"attention.qk_norm_{name}" for name in ("width", "bias", "rotated"))
    if config.norm.kind != "LayerNorm" or not config.norm.weight:
        yield "norm.bias"
    if not config.parallel_residual:
        yield "norm.shared"
    if not config.attention.o_bias:
        yield "attention.o_bias_last"
    if not (config.attention.output_gate or config.attention.head_gate):
        yield "attention.gate_activation"
    if not config.attention.sinks:
        yield "attention.sinks_in_windows"
    if positions.kind not in ("learned", "sinusoidal"):
        yield "positions.offset"
    has_one_theta = positions.local_theta == positions.theta and not positions.scaling
    if config.window is None or has_one_theta:
        yield "positions.local_theta"
    if config.window is None or positions.local_rotary_percent == positions.rotary_percent:
        yield "positions.local_rotary_percent"
    if not config.has("partly_scaled"):
        yield "layers.scales_positions"
    if not config.has("linear_layers") and not config.has("kda_layers"):
        yield from _fields_below("linear.")
    if not config.has("mamba_layers"):
        yield from _fields_below("mamba.")
    yield from _of_entries_without_effect(config)
    if not config.has("convolution_layers"):
        yield "convolution.width"
    if not config.layer_inputs.width:
        yield "layer_inputs.vocab"
    if not config.has("block_indexer"):
        yield from _fields_below("block_indexer.")
    if not config.streams.count:
        yield from (name for name in _fields_below("streams.") if name != "streams.count")
    if not config.hyper.streams:
        yield from (name for name in _fields_below("hyper.") if name != "hyper.streams")
    if not config.retrieval.layers:
        yield from (name for name in _fields_below("retrieval.") if name != "retrieval.layers")
    if not config.indexer.heads:
        yield from (name for name in _fields_below("indexer.") if name != "indexer.heads")
    if not experts.count:
        yield from (name for name in _fields_below("experts.") if name != "experts.count")
        yield "layers.hashed"
    elif not config.layers_with("dense"):
        yield "mlp.ffn"
    if experts.groups == 1:
        yield from ("experts.groups", "experts.group_topk")
    if experts.scale == 1:
        yield "experts.scale"


def _of_entries_without_effect(config: ModelConfig) -> Iterator[str]:
    """The fields of compressed attention that have no effect."""
    if not config.has("compressed_layers"):
        yield from ("layers.entries", *_fields_below("compressed."))
        return
    kinds = {kind.entries for kind in config.layers}
    if "selected" not in kinds:
        yield from (f"compressed.{name}" for name in ("short", "index_heads", "index_dim", "topk"))
    if "all" not in kinds:
        yield "compressed.long"
    if kinds == {"none"}:
        yield from ("compressed.theta", "compressed.scaling")


_OF_ROPE = (
    "positions.theta", "positions.local_theta", "positions.scaling", "positions.rotary_percent", "positions.interleaved",
    "positions.backwards", "positions.sections", "positions.local_rotary_percent", "layers.rotates", "layers.scales_positions",
)  # fmt: skip


def _fields_below(prefix: str) -> Iterator[str]:
    return (name for name in FIELDS if name.startswith(prefix))


def _full_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """Rope scaling with the values that transformers and Megatron assume for missing keys. Both ignore one mscale
    without the other."""
    if config.positions.scaling is None:
        return None
    given = {name: value for name, value in config.positions.scaling.items() if value is not None}
    if given["rope_type"] != "yarn":
        return given
    original = 4096 if config.latent.kv_rank else config.max_positions
    usual = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": original,
        "truncate": True,
    }
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    return usual | given


def config_differences(left: ModelConfig, right: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, left value, right value) for each field that differs in meaning. None: the model has no such field."""
    ours, theirs = (
        {"family": left.family} | _described(left),
        {"family": right.family} | _described(right),
    )
    names = dict.fromkeys((*ours, *theirs))
    return [
        (name, ours.get(name), theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _described(config: ModelConfig) -> dict[str, Any]:
    """The meaning of a model, or the keys of its config.json if no family describes it."""
    if config.own_names is None:
        return meaning_of(config)
    stated = config.own_names.config.items()
    return {"dtype": config.dtype} | {key: value for key, value in stated if key not in _OF_FILES}


def lost_fields(
    config: ModelConfig, back: ModelConfig, *, but: Iterable[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Field -> (value, value after the round trip) for each field that another description doesn't keep.

    but: fields that may differ.
    """
    skipped = {"family", *but}
    return {
        name: (ours, theirs)
        for name, ours, theirs in config_differences(config, back)
        if name not in skipped
    }


def require_same_structure(
    stated: ModelConfig, found: ModelConfig, described: str, where: str
) -> None:
    """Raise TensorMismatch unless a description fits the tensors of a checkpoint.

    stated: the model that the file `described` describes. found: the model of the checkpoint `where`, which doesn't
    say whether its head is tied.
    """
    for name in (*STRUCTURE, "vocab"):
        given, expected = value_of(stated, name), value_of(found, name)
        if given != expected and name != "tie_embeddings":
            raise TensorMismatch(
                f"{described}: says {name} = {given}, {where} has {expected}; it describes another model"
            )


def require_kept(
    config: ModelConfig, back: ModelConfig, where: str, *, but: Iterable[str] = ()
) -> None:
    """Raise NotExpressible, with the fields' names, if another description doesn't keep all fields.

    back: the configuration after the round trip. where: names the description that can't represent them. but: fields
    that may differ.
    """
    lost = lost_fields(config, back, but=but)
    if not lost:
        return
    # A field without effect there follows from another field. The message names that other field.
    kept_fields = meaning_of(back)
    name, *others = [name for name in lost if name in kept_fields] or list(lost)
    value, kept = lost[name]
    more = f" (and {', '.join(others)})" if others else ""
    raise NotExpressible(
        f"the model's {name} is {value!r}, which {where} can't represent: "
        f"it would be {kept!r} there{more}"
    )
