"""Mamba 2 mixers, for all families that have them.

    layers.{l}.mamba.{z|x|B|C|dt}   projections of a token: x, B and C pass a convolution, z gates the output, dt is the time step
    layers.{l}.mamba.{A_log|D}      how fast each head forgets, and how much of x bypasses the state

Each of the five projections is sharded separately, by its heads or groups of heads, and so are the three parts of the
convolution. Source: modeling_nemotron_h.py of transformers 5; mamba_mixer.py of megatron-core 0.16.1, whose convolution
is over 4 positions.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.decoder_keys import heads
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, size
from megaconv.model.config import ModelConfig
from megaconv.model.pattern import layer_fields, pattern_of
from megaconv.model.table import Fused, Row

_CORE = "decoder.layers.{l}.mixer."
_INNER, _STATE = "mamba_heads*mamba_head_dim", "mamba_groups*mamba_state"


def mamba_rows(norm: str, mixer: str) -> tuple[Row, ...]:
    """The rows of a mixer. norm, mixer: Hugging Face's prefixes for the norm before the mixer, and for the mixer's own
    tensors."""
    return (
        Row("layers.{l}.input_norm.weight", ("hidden",), when="mamba",
            hf=norm + "weight",
            core=_CORE + "in_proj.layer_norm_weight",
            core_local="decoder.layers.{l}.norm.weight"),
        Row("layers.{l}.mamba.{dt_bias|A_log|D}", ("mamba_heads",) * 3, tp=0, when="mamba",
            hf=mixer + "{dt_bias|A_log|D}",
            core=_CORE + "{dt_bias|A_log|D}"),
        Row("layers.{l}.mamba.{z|x|B|C|dt}.weight",
            (f"{_INNER} hidden", f"{_INNER} hidden", f"{_STATE} hidden", f"{_STATE} hidden", "mamba_heads hidden"), tp=0, when="mamba",
            hf=Fused(mixer + "in_proj.weight"),
            core=Fused(_CORE + "in_proj.weight")),
        Row("layers.{l}.mamba.conv.{x|B|C}.weight", (f"{_INNER} 1 4", f"{_STATE} 1 4", f"{_STATE} 1 4"), tp=0, when="mamba",
            hf=Fused(mixer + "conv1d.weight"),
            core=Fused(_CORE + "conv1d.weight")),
        Row("layers.{l}.mamba.conv.{x|B|C}.bias", (_INNER, _STATE, _STATE), tp=0, when="mamba",
            hf=Fused(mixer + "conv1d.bias"),
            core=Fused(_CORE + "conv1d.bias")),
        Row("layers.{l}.mamba.out_norm.weight", (_INNER,), tp=0, when="mamba",
            hf=mixer + "norm.weight",
            core=_CORE + "norm.weight"),
        Row("layers.{l}.mamba.out.weight", (f"hidden {_INNER}",), tp=1, when="mamba",
            hf=mixer + "out_proj.weight",
            core=_CORE + "out_proj.weight"),
    )  # fmt: skip


MAMBA_SIZES: tuple[Keys, ...] = (
    size("mamba_num_heads", "mamba.heads", 128),
    size("mamba_head_dim", "mamba.head_dim", 64),
    size("n_groups", "mamba.groups", 8),
    size("ssm_state_size", "mamba.state", 128),
)
"""The sizes of Mamba 2, with transformers' own defaults."""

_WORDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Word for a layer -> symbol. transformers 5.23 and earlier releases write these words; files on the Hub have symbols.
"""


def layer_symbols(words: Sequence[str]) -> str:
    """A hybrid pattern from transformers' words for its layers; `?` for an unknown word."""
    return "".join(_WORDS.get(word, "?") for word in words)


def _pattern(raw: Raw) -> str:
    kinds = raw.get("layers_block_type")
    if kinds is None:
        return str(raw.get("hybrid_override_pattern") or "ME*-")
    others = [kind for kind in kinds if kind not in _WORDS]
    if others:
        raise NotExpressible(
            f"{CONFIG_NAME}: layers_block_type has {others[0]!r}; supported: {', '.join(_WORDS)}"
        )
    return layer_symbols(kinds)


def _read_layers(raw: Raw) -> Fields:
    pattern, layers = _pattern(raw), raw.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_hidden_layers is {layers!r}, its pattern has {len(pattern)} layers"
        )
    return layer_fields(pattern, f"{CONFIG_NAME}: hybrid_override_pattern")


def _write_layers(config: ModelConfig) -> Raw:
    return {"hybrid_override_pattern": pattern_of(config), "num_hidden_layers": config.layer_count}


PATTERN = Keys(
    ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers"),
    _read_layers,
    _write_layers,
)


def of_experts(declared: Keys) -> Keys:
    """Keys that apply only to models with experts. A model without experts may have them as well, without effect."""
    return Keys(
        declared.names,
        lambda raw: declared.read(raw) if "E" in _pattern(raw) else {},
        lambda config: declared.write(config) if config.experts.count else {},
    )


def _read_heads(raw: Raw) -> Fields:
    older = {"head_dim": raw["attention_head_dim"]} if "attention_head_dim" in raw else {}
    return _HEADS.read({**older, **raw})


_HEADS = heads(8, 128)
_NO_LIMIT = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
"""No limit, with infinity as Python's JSON and as transformers 5 write it."""


def _time_step_limit(raw: Raw) -> Fields:
    if list(raw.get("time_step_limit") or _NO_LIMIT[0]) not in _NO_LIMIT:
        raise NotExpressible(
            f"{CONFIG_NAME}: time_step_limit {raw['time_step_limit']!r} is not supported, since Megatron core has no limit on time steps"
        )
    return {}


HEADS = Keys((*_HEADS.names, "attention_head_dim"), _read_heads, _HEADS.write)
TIME_STEP_LIMIT = Keys(("time_step_limit",), _time_step_limit, lambda config: {})
LEAST_TIME_STEP = 0.001
"""Lower limit of time steps in transformers' classes."""
LIMITED_TIME_STEPS = {"mamba.least_time_step": LEAST_TIME_STEP}
"""The same limit as a field, for all models whose classes use it."""
MAMBA_ONLY: dict[str, Any] = {
    **{
        "mamba_hidden_act": "silu",
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
    },
    **{"layer_norm_epsilon": 1e-5, "time_step_min": LEAST_TIME_STEP},
}
"""Megatron core's mixer has no other convolution, no biases on projections, and no separate epsilon for its norm."""


def limited_time_steps(config: ModelConfig) -> tuple[str, ...]:
    return (
        f"transformers makes time steps of Mamba layers at least {LEAST_TIME_STEP} (time_step_min), Megatron core has no such limit: the "
        "weights "
        "are the same, and so are logits but where time steps are smaller",
    )
