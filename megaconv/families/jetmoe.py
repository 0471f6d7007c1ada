"""JetMoE: experts in attention too. Each has queries and an output projection of its own; keys and values are the same for all.

    model.layers.{l}.self_attention.{kv_proj, experts.{router, input_linear, output_linear, bias}}
    model.layers.{l}.mlp.{router, input_linear, output_linear, bias}

Published files have other names of keys (moe_num_experts, moe_top_k). transformers' class doesn't read them, and its defaults
are the same values. The class normalizes with rms_norm_eps after the last layer alone, and with 1e-6 in layers. Megatron core
has no such attention: these models are converted between Hugging Face's files. Source: JetMoeConfig and modeling_jetmoe.py of
transformers 5.24.
"""

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, body_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.experts import EXPERTS_WIDTH, MOE_NORM
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number, need_size
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Row, Stacked

_ATTENTION, _MLP = "model.layers.{l}.self_attention.", "model.layers.{l}.mlp."
_OF_EXPERTS = _ATTENTION + "experts."
_WIDTH = "kv_heads*head_dim"
_INPUT_NORM = ATTENTION[0]
_LAYERS = (
    _INPUT_NORM,
    Row("layers.{l}.attn.{k|v}.weight", (f"{_WIDTH} hidden",) * 2, tp=0,
        hf=Fused(_ATTENTION + "kv_proj.weight")),
    Row("layers.{l}.attn.router.weight", ("experts hidden",), when="moe",
        hf=_OF_EXPERTS + "router.layer.weight"),
    Row("layers.{l}.attn.experts.{e}.q.weight", (f"{_WIDTH} hidden",), tp=0, when="moe",
        hf=Stacked(_OF_EXPERTS + "input_linear.weight")),
    Row("layers.{l}.attn.experts.{e}.o.weight", (f"hidden {_WIDTH}",), tp=1, when="moe",
        hf=Stacked(_OF_EXPERTS + "output_linear.weight")),
    Row("layers.{l}.attn.output_bias", ("hidden",), when="moe",
        hf=_OF_EXPERTS + "bias"),
    MOE_NORM,
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
        hf=_MLP + "router.layer.weight"),
    Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn hidden", "moe_ffn hidden"), tp=0, when="moe",
        hf=Stacked(_MLP + "input_linear.weight")),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=Stacked(_MLP + "output_linear.weight")),
    Row("layers.{l}.mlp.output_bias", ("hidden",), when="moe",
        hf=_MLP + "bias"),
)  # fmt: skip
ROWS = hf_only((EMBEDDING, *_LAYERS, *HEAD))

_HEADS, _GROUPS, _CHANNELS, _EPSILON = (
    "num_attention_heads", "num_key_value_heads", "kv_channels", "rms_norm_eps",
)  # fmt: skip
_COUNT, _CHOSEN, _WIDTH_KEY = "num_local_experts", "num_experts_per_tok", "intermediate_size"
_LAYER_EPSILON = 1e-6


def _read_heads(raw: Raw) -> Fields:
    """Each of a token's experts has as many queries as there are keys."""
    groups, chosen = need_size(raw, _GROUPS, 16), need_size(raw, _CHOSEN, 2)
    if raw.get(_HEADS, groups * chosen) != groups * chosen:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_HEADS} is {raw[_HEADS]!r:.40}, but {groups} {_GROUPS} of each of {chosen} experts make {groups * chosen}; "
            f"leave {_HEADS} out"
        )
    return {
        "attention.heads": groups * chosen,
        "attention.kv_heads": groups,
        "attention.head_dim": need_size(raw, _CHANNELS, 128),
        "experts.count": need_size(raw, _COUNT, 8),
        "experts.per_token": chosen,
    }


def _write_heads(config: ModelConfig) -> Raw:
    return {
        _GROUPS: config.attention.kv_heads,
        _CHANNELS: config.attention.head_dim,
        _COUNT: config.experts.count,
        _CHOSEN: config.experts.per_token,
    }


def _read_epsilon(raw: Raw) -> Fields:
    last = need_number(raw, _EPSILON, _LAYER_EPSILON)
    return {"norm.final_epsilon": None if last == _LAYER_EPSILON else last}


def _write_epsilon(config: ModelConfig) -> Raw:
    last = config.norm.final_epsilon
    return {_EPSILON: _LAYER_EPSILON if last is None else last}


_OLDER = {
    "ffn_hidden_size": (_WIDTH_KEY, 5632),
    "moe_num_experts": (_COUNT, 8),
    "moe_top_k": (_CHOSEN, 2),
    "n_positions": ("max_position_embeddings", 4096),
}
"""Key of published files -> (the key that transformers' class reads instead, its default)."""


def _read_older(raw: Raw) -> Fields:
    """Raise CorruptCheckpoint if a key of published files says something that transformers' class doesn't compute."""
    for older, (key, default) in _OLDER.items():
        computed = raw.get(key, default)
        stated = raw.get(older, computed)
        if stated != computed:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {older} is {stated!r:.40}, but transformers' class computes with {key} {computed!r:.40}; "
                f"write {key} with the value of the trained model, and leave {older} out"
            )
    return {}


def _read_width(raw: Raw) -> Fields:
    width = need_size(raw, _WIDTH_KEY, 5632)
    return {"mlp.ffn": width, "experts.ffn": width}


_BODY = body_keys(positions=4096, epsilon_key=None, tied=True, tokens=(1, 2, None))
_KEYS = (
    *without_keys(_BODY, _WIDTH_KEY),
    Keys((_WIDTH_KEY,), _read_width, EXPERTS_WIDTH.write),
    Keys(tuple(_OLDER), _read_older, lambda config: {}),
    Keys((_HEADS, _GROUPS, _CHANNELS, _COUNT, _CHOSEN), _read_heads, _write_heads),
    Keys((_EPSILON,), _read_epsilon, _write_epsilon),
)
_FIXED = {
    **LLAMA_LIKE,
    "layers.mlp": "experts",
    "attention.of_experts": True,
    "experts.output_bias": True,
    "norm.epsilon": _LAYER_EPSILON,
}

FAMILY = Family(
    name="jetmoe",
    architectures=("JetMoeForCausalLM", "JetMoEForCausalLM"),
    model_type="jetmoe",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"activation_function": "silu", "glu": True, "rotary_percent": 1.0},
    aliases={"head_dim": _CHANNELS},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
