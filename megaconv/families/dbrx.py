"""DBRX: LayerNorms without biases, limits of q, k and v, rope, and experts whose matrices share three tensors.

    transformer.blocks.{l}.norm_attn_norm.attn.Wqkv.weight    q, k and v
    transformer.blocks.{l}.ffn.experts.mlp.{w1, v1}           [experts * ffn, hidden]: gate and up of all experts
    transformer.blocks.{l}.ffn.experts.mlp.w2                 [experts * ffn, hidden]: down, transposed

Published files have the base of rope in attn_config. transformers 4, vLLM and mlx-lm read it there. transformers 5 reads
rope_parameters instead, and takes 10000 without them. A new config.json has both keys. A file in which they differ is refused.
Megatron core has no limits of q, k and v, and no LayerNorm without biases: these models are converted between Hugging Face's
files, and trained. Source: DbrxConfig and modeling_dbrx.py of transformers 5.24.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LAYER_NORM, model_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import MOE_NORM, expert_rows
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size, size
from megaconv.families.parts.rope import rope, rope_object
from megaconv.families.parts.row_changes import (
    in_all_forms,
    in_core,
    respelled,
    with_modules,
    without_biases,
    without_rows,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Spelling, Stacked, StackedTransposed

_ALL = "transformer.blocks.{l}.ffn.experts.mlp."
_SHAPE = "experts*moe_ffn hidden"
_EXPERT_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.router.weight": "transformer.blocks.{l}.ffn.router.layer.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": (
        Stacked(_ALL + "w1", _SHAPE, members=(0,)), Stacked(_ALL + "v1", _SHAPE, members=(1,)),
    ),
    "layers.{l}.mlp.experts.{e}.down.weight": StackedTransposed(_ALL + "w2", _SHAPE),
}  # fmt: skip
_FUSED = {
    "layers.{l}.attn.{q|k|v}.weight": {
        "hf": Fused("transformer.blocks.{l}.norm_attn_norm.attn.Wqkv.weight")
    }
}
_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.blocks.{l}",
    "input_layernorm": "norm_attn_norm.norm_1",
    "self_attn.o_proj": "norm_attn_norm.attn.out_proj",
    "post_attention_layernorm": "norm_attn_norm.norm_2",
    "model.norm": "transformer.norm_f",
}
_ATTENTION = without_rows(without_biases(ATTENTION), "layers.{l}.attn.{q|k}_norm.weight")
_LAYERS = with_modules(respelled((EMBEDDING, *_ATTENTION, MOE_NORM, *HEAD), _FUSED), _MODULES)
ROWS = in_core((*_LAYERS, *in_all_forms(expert_rows("", "{|}", ""), _EXPERT_NAMES)))

_ATTENTION_KEY, _EXPERTS_KEY = "attn_config", "ffn_config"
_HEADS, _KV_HEADS, _LENGTH = "n_heads", "num_key_value_heads", "max_seq_len"
_ACTIVATION, _POWER = "ffn_act_fn", "moe_normalize_expert_weights"
_ROTATION = rope(10000.0)


def _object(raw: Raw, key: str) -> dict[str, Any]:
    """The object of a key; empty if the key is missing."""
    stated: Any = raw.get(key) or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be an object, found {stated!r:.60}")
    return stated


def _read_attention(raw: Raw) -> Fields:
    stated = _object(raw, _ATTENTION_KEY)
    hidden, heads = need_size(raw, "d_model", 2048), need_size(raw, _HEADS, 16)
    kv_heads = need_size(stated, "kv_n_heads", 1)
    if raw.get(_KV_HEADS, kv_heads) != kv_heads:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_ATTENTION_KEY} has kv_n_heads {kv_heads}, and {_KV_HEADS} is {raw[_KV_HEADS]!r}; leave the second one out"
        )
    for count, name, whole, of_what in (
        (heads, _HEADS, hidden, "d_model"),
        (kv_heads, "kv_n_heads", heads, _HEADS),
    ):
        if whole % count:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {name} {count} doesn't divide {of_what} {whole}"
            )
    return {
        "attention.heads": heads,
        "attention.kv_heads": kv_heads,
        "attention.head_dim": hidden // heads,
        "attention.clip": stated.get("clip_qkv"),
    }


def _read_rope(raw: Raw) -> Fields:
    """Base and scaling of rope. The base may be in attn_config, in rope_parameters, or in both."""
    inner = _object(raw, _ATTENTION_KEY).get("rope_theta")
    outer = rope_object(raw).get("rope_theta", raw.get("rope_theta"))
    if inner is not None and outer is not None and inner != outer:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: rope_theta is {inner} in {_ATTENTION_KEY} and {outer} outside; write the base of the trained model in both "
            "places (transformers 5 computes with the outer one, other software with the inner one)"
        )
    given = {**raw, "max_position_embeddings": need_size(raw, _LENGTH, 2048)}
    return _ROTATION.read(given if inner is None else {**given, "rope_theta": inner})


def _write_attention(config: ModelConfig) -> Raw:
    attention = config.attention
    inner = {
        "clip_qkv": attention.clip,
        "kv_n_heads": attention.kv_heads,
        "rope_theta": config.positions.theta,
    }
    return {_HEADS: attention.heads, _ATTENTION_KEY: inner}


def _read_experts(raw: Raw) -> Fields:
    stated = _object(raw, _EXPERTS_KEY)
    activation = stated.get(_ACTIVATION) or {"name": "silu"}
    if activation != {"name": "silu"}:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_EXPERTS_KEY} has {_ACTIVATION} {activation!r:.60}, only {{'name': 'silu'}} is supported"
        )
    power = stated.get(_POWER, 1.0)
    if power not in (None, 1):
        raise NotExpressible(
            f"{CONFIG_NAME}: {_EXPERTS_KEY} has {_POWER} {power!r:.60}, only 1 and null are supported"
        )
    width = need_size(stated, "ffn_hidden_size", 3584)
    return {
        "mlp.ffn": width,
        "experts.ffn": width,
        "experts.count": need_size(stated, "moe_num_experts", 4),
        "experts.per_token": need_size(stated, "moe_top_k", 1),
        "experts.renormalize": power is not None,
    }


def _write_experts(config: ModelConfig) -> Raw:
    experts = config.experts
    inner = {
        _ACTIVATION: {"name": "silu"},
        "ffn_hidden_size": experts.ffn,
        "moe_num_experts": experts.count,
        "moe_top_k": experts.per_token,
        _POWER: 1.0 if experts.renormalize else None,
    }
    return {_EXPERTS_KEY: inner}


_KEYS = (
    size("d_model", "hidden", 2048),
    size("n_layers", "layers.count", 24),
    size(_LENGTH, "max_positions", 2048),
    Keys((_HEADS, _KV_HEADS, _ATTENTION_KEY), _read_attention, _write_attention),
    Keys(_ROTATION.names, _read_rope, _ROTATION.write),
    Keys((_EXPERTS_KEY,), _read_experts, _write_experts),
    *without_keys(model_keys(tied=False, tokens=(None, None, None)), "tie_word_embeddings"),
)
_FIXED = {
    **LAYER_NORM,
    "norm.bias": False,
    "norm.epsilon": 1e-5,
    "layers.mlp": "experts",
    "mlp.activation": "silu",
    "mlp.gated": True,
}
_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": _HEADS,
    "max_position_embeddings": _LENGTH,
}

FAMILY = Family(
    name="dbrx",
    architectures=("DbrxForCausalLM",),
    model_type="dbrx",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"tie_word_embeddings": False},
    aliases=_ALIASES,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
