"""The meaning of a model's configuration: the fields that have an effect. Configurations are compared by it."""

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.model.config import ModelConfig
from megaconv.model.described import OF_ONE_LAYER, value_of
from megaconv.model.fields import FIELDS, STRUCTURE, fields_of, one_or_each
from megaconv.model.sizes import SIZES

_log = logging.getLogger("megaconv")

_OF_FILES = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of a config.json about its files instead of its model."""


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
    left_out = without_effect - _NONE_IF_ONE
    return {name: value for name, value in values.items() if name not in left_out}


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
    # Each library uses its own value and ignores the configuration. The families' notices say so.
    yield "latent.norm_epsilon"
    yield "mamba.least_time_step"
    yield from ("linear.stored_decays", "ngrams.stored_parts", "ngrams.stored_hashes")
    yield from ("experts.stores_idle", "positions.stored")
    for switch in _SWITCHES:
        if not value_of(config, switch):
            subject, _, _ = switch.partition(".")
            yield from (name for name in _fields_below(f"{subject}.") if name != switch)
    yield from _of_positions_without_effect(config)
    yield from _of_attention_without_effect(config)
    yield from _of_mixers_without_effect(config)
    if config.norm.kind != "LayerNorm" or not config.norm.weight:
        yield "norm.bias"
    yield from _of_single_norms_without_effect(config)
    yield from _of_heads_without_effect(config)
    if not config.parallel_residual:
        yield "norm.shared"
    if not config.indexer.pool:
        yield "indexer.keeps_tail"
    if not config.hyper.mixes:
        yield "hyper.iterations"
    if not config.layer_inputs.width:
        yield "layer_inputs.vocab"
    if not config.has("ngram_layers"):
        yield from _fields_below("ngrams.")
    if config.hyper.rank:
        yield from ("hyper.iterations", "hyper.epsilon", "hyper.mixes")
    experts = config.experts
    if not experts.count:
        yield "layers.hashed"
    elif not config.layers_with("dense"):
        yield "mlp.ffn"
    if experts.score != "sparsemixer":
        yield "experts.nearness"
    if experts.groups == 1:
        yield from ("experts.groups", "experts.group_topk")
    if experts.scale == 1:
        yield "experts.scale"


_SWITCHES = (
    "convolved.channels",
    "experts.count",
    "hyper.streams",
    "indexer.heads",
    "loops.runs",
    "unit_states.unit",
    "recurrence.high",
    "relative.width",
    "retrieval.layers",
    "streams.count",
)
"""Sizes without which the other fields of their subject have no effect."""


def _of_positions_without_effect(config: ModelConfig) -> Iterator[str]:
    positions = config.positions
    if not config.has("rope"):
        kept = ("positions.theta",) if positions.kind == "sinusoidal" else ()
        yield from (name for name in _OF_ROPE if name not in kept)
    if positions.kind not in ("learned", "sinusoidal"):
        yield "positions.offset"
    has_one_theta = positions.local_theta == positions.theta and not positions.scaling
    if config.window is None or has_one_theta:
        yield "positions.local_theta"
    if config.window is None or positions.local_rotary_percent == positions.rotary_percent:
        yield "positions.local_rotary_percent"
    if not config.has("partly_scaled"):
        yield "layers.scales_positions"


def _of_single_norms_without_effect(config: ModelConfig) -> Iterator[str]:
    """The fields about single norms that the model doesn't have, or that are like all others."""
    norm = config.norm
    if not norm.embedding:
        yield "norm.embedding_weight"
    if norm.place not in ("after", "both"):
        yield from ("norm.output_epsilon", "norm.scales_first")
    if not norm.zero_centered:
        yield "norm.plain_final"
    if not config.experts.latent:
        yield "experts.normed_latent"


OF_WORDS = ("head.bias", "head.logit_cap", "head.divisor", "head.normalized", "head.left_out")
"""Fields of a head for words alone."""


def _of_heads_without_effect(config: ModelConfig) -> Iterator[str]:
    """The fields of a head that the model doesn't have: for words, or of scores."""
    yield from ("head.of_tokens", "head.pooler")
    if not config.head.labels:
        yield "head.labels_bias"
    else:
        yield from OF_WORDS


def _of_attention_without_effect(config: ModelConfig) -> Iterator[str]:
    attention = config.attention
    if not attention.qk_norm:
        yield from (f"attention.qk_norm_{name}" for name in ("width", "weight", "bias", "rotated"))
    if not attention.o_bias:
        yield "attention.o_bias_last"
    if not (attention.output_gate or attention.head_gate):
        yield "attention.gate_activation"
    if not attention.output_gate:
        yield "attention.gate_bias"
    if not attention.sinks:
        yield "attention.sinks_in_windows"
    if not config.has("block_indexer"):
        yield from _fields_below("block_indexer.")
    if not config.indexer.heads:
        yield "layers.shares_index"
    yield from _of_entries_without_effect(config)


def _of_mixers_without_effect(config: ModelConfig) -> Iterator[str]:
    """The fields of mixers that no layer has, other than attention."""
    if not config.has("linear_layers") and not config.has("kda_layers"):
        yield from _fields_below("linear.")
    if not config.has("mamba_layers"):
        yield from _fields_below("mamba.")
    if not config.has("mamba1_layers"):
        yield from _fields_below("mamba1.")
    elif config.mamba1.norms == "none":
        yield "mamba1.norm_epsilon"
    if not config.has("recurrent_layers"):
        yield from _fields_below("recurrent.")
    if not config.has("shared_blocks"):
        yield from _fields_below("blocks.")
    if not config.has("convolution_layers"):
        yield "convolution.width"


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
    "positions.scaled_frequencies",
)  # fmt: skip


@cache
def _fields_below(prefix: str) -> tuple[str, ...]:
    return tuple(name for name in FIELDS if name.startswith(prefix))


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
    ours = {"family": left.family} | _described(left)
    theirs = {"family": right.family} | _described(right)
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


_COMPUTED = ("norm.epsilon", "positions.theta", "mlp.activation", "experts.per_token")
"""Fields that change what a model computes and that no tensor's shape shows."""


def name_contradictions(
    stated: ModelConfig, found: ModelConfig, described: str, where: str
) -> None:
    """Warn of values that no tensor shows and that differ from those of a checkpoint. Parameters: as above."""
    differing = [
        (name, value_of(stated, name), value_of(found, name))
        for name in _COMPUTED
        if value_of(stated, name) != value_of(found, name)
    ]
    scaled, unscaled = stated.positions.scaling, found.positions.scaling
    if (scaled is None) != (unscaled is None):
        differing.append(("positions.scaling", scaled, unscaled))
    for name, given, own in differing:
        _log.warning(
            "%s says %s = %s, the settings in %s say %s; --config wins",
            described,
            name,
            given,
            where,
            own,
        )


_REMEDIES = {
    "norm.zero_centered": "; --option norms=plain adds 1 to the norms' weights, and needs --dtype fp32 to be exact",
}
"""Field -> what to do if a description can't represent it."""


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
    more += _REMEDIES.get(name, "")
    raise NotExpressible(
        f"the model's {name} is {value!r}, which {where} can't represent: "
        f"it would be {kept!r} there{more}"
    )
