"""Jamba: a Mamba 1 or attention without positions, and an MLP or experts in each layer.

    hf    model.layers.{l}.{input_layernorm, mamba | self_attn, pre_ff_layernorm, feed_forward}, model.final_layernorm

Every attn_layer_period-th layer has attention, and every expert_layer_period-th layer has experts. Megatron core has Mamba 2
only: these models are converted between Hugging Face's files. Source: JambaConfig and modeling_jamba.py of transformers 5.23.
"""

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, heads, model_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_size,
    number,
    size,
)
from megaconv.families.parts.mamba1 import inner_norms, mamba1_rows, time_step_rank
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.row_changes import hf_only, respelled, without_biases, without_rows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Spelling, Stacked

_LAYER = "model.layers.{l}."
_FEED = _LAYER + "feed_forward."
_ROUTER = _FEED + "router.weight"
_NAMES: dict[str, dict[str, Spelling]] = {
    "layers.{l}.mlp_norm.weight": {"hf": _LAYER + "pre_ff_layernorm.weight"},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": _FEED + "{gate|up}_proj.weight"},
    "layers.{l}.mlp.down.weight": {"hf": _FEED + "down_proj.weight"},
    "layers.{l}.mlp.router.weight": {"hf": _ROUTER, "hf_stacked": _ROUTER},
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {
        "hf": _FEED + "experts.{e}.{gate|up}_proj.weight",
        "hf_stacked": Stacked(_FEED + "experts.gate_up_proj"),
    },
    "layers.{l}.mlp.experts.{e}.down.weight": {
        "hf": _FEED + "experts.{e}.down_proj.weight",
        "hf_stacked": Stacked(_FEED + "experts.down_proj"),
    },
}
_ATTENTION = without_rows(without_biases(ATTENTION), "layers.{l}.attn.{q|k}_norm.weight")
_MIXERS = (
    *rows_of("attention", _ATTENTION),
    *mamba1_rows(_LAYER + "input_layernorm.", _LAYER + "mamba."),
    inner_norms(_LAYER + "mamba."),
)
_FEED_FORWARD = respelled((*without_biases(MLP), MOE_NORM, *QWEN_EXPERTS), _NAMES)
_FINAL_NORM = HEAD[0].renamed(hf="model.final_layernorm.weight")
ROWS = hf_only((EMBEDDING, *_MIXERS, *_FEED_FORWARD, _FINAL_NORM, HEAD[1]))

_COUNT = "num_hidden_layers"
_ATTENDS = ("attn_layer_period", "attn_layer_offset", 8, 4)
_HAS_EXPERTS = ("expert_layer_period", "expert_layer_offset", 2, 1)
"""(key of the period, key of the first layer, and their defaults)."""
Pattern = tuple[str, str, int, int]


def _chosen(raw: Raw, pattern: Pattern) -> list[int]:
    """The layers of a pattern."""
    period_key, first_key, usual_period, usual_first = pattern
    period = need_size(raw, period_key, usual_period)
    first = raw.get(first_key, usual_first)
    if type(first) is not int or not 0 <= first < period:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {first_key} should be a number below {period_key} {period}, found {first!r:.60}"
        )
    return list(range(first, need_size(raw, _COUNT, 32), period))


def _pattern_of(layers: tuple[int, ...], total: int, pattern: Pattern, words: str) -> Raw:
    """The keys of these layers. Raises NotExpressible if they are no pattern. words: names the layers."""
    period_key, first_key, _, _ = pattern
    first = layers[0] if layers else total
    period = layers[1] - first if layers[1:] else total + 1
    if first >= period or tuple(range(first, total, period)) != layers:
        raise NotExpressible(
            f"the model's {words} are {layers}; {period_key} and {first_key} can only give every n-th layer"
        )
    return {period_key: period, first_key: first}


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, _COUNT, 32)
    attends = per_layer(_chosen(raw, _ATTENDS), layers, "attention", "mamba1")
    some = need_size(raw, "num_experts", 16)
    # One expert is a plain MLP.
    sparse = _chosen(raw, _HAS_EXPERTS) if some > 1 else []
    return {
        "layers.count": layers,
        "layers.mixer": attends,
        "layers.mlp": per_layer(sparse, layers, "experts", "dense"),
        "experts.count": some if some > 1 else 0,
    }


def _write_layers(config: ModelConfig) -> Raw:
    total, sparse = config.layer_count, config.layers_with("moe")
    attends = config.layers_with("attention")
    return {
        _COUNT: total,
        "num_experts": config.experts.count or 1,
        **_pattern_of(attends, total, _ATTENDS, "layers with attention (layers.mixer)"),
        **_pattern_of(sparse, total, _HAS_EXPERTS, "layers with experts (layers.mlp)"),
    }


_EXPAND, _RANK = "mamba_expand", "mamba_dt_rank"


def _read_widths(raw: Raw) -> Fields:
    hidden = need_size(raw, "hidden_size", 4096)
    width = need_size(raw, _EXPAND, 2) * hidden
    return {"hidden": hidden, "mamba1.width": width, **time_step_rank(raw, _RANK, hidden)}


def _write_widths(config: ModelConfig) -> Raw:
    expand, rest = divmod(config.mamba1.width, config.hidden)
    if rest:
        raise NotExpressible(
            f"the model's mamba1.width is {config.mamba1.width}, which is no multiple ({_EXPAND}) of the hidden size {config.hidden}"
        )
    return {"hidden_size": config.hidden, _EXPAND: max(1, expand), _RANK: max(1, config.mamba1.rank)}  # fmt: skip


def _read_ffn(raw: Raw) -> Fields:
    """The width of the MLP, which is also that of an expert."""
    width = need_size(raw, "intermediate_size", 14336)
    return {"mlp.ffn": width, "experts.ffn": width}


_KEYS = (
    Keys((_COUNT, "num_experts", *_ATTENDS[:2], *_HAS_EXPERTS[:2]), _read_layers, _write_layers),
    Keys(("hidden_size", _EXPAND, _RANK), _read_widths, _write_widths),
    Keys(("intermediate_size",), _read_ffn, lambda config: {"intermediate_size": config.mlp.ffn}),
    size("num_experts_per_tok", "experts.per_token", 2),
    heads(8, own_size=False),
    size("mamba_d_state", "mamba1.state", 16),
    size("mamba_d_conv", "mamba1.conv", 4),
    flags("mamba_conv_bias", ("mamba1.conv_bias",), default=True),
    flags("mamba_proj_bias", ("mamba1.bias",), default=False),
    size("max_position_embeddings", "max_positions", 262144),
    number("rms_norm_eps", "norm.epsilon", 1e-6),
    *model_keys(tied=False, tokens=(1, 2, 0)),
)
_FIXED = {
    **LLAMA_LIKE,
    "positions.kind": "none",
    "mamba1.norms": "weighted",
    "experts.renormalize": False,
}

FAMILY = Family(
    name="jamba",
    architectures=("JambaForCausalLM",),
    model_type="jamba",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=SILU,
    aliases={"num_local_experts": "num_experts"},
    recognized=None,
    proven="names",
)
