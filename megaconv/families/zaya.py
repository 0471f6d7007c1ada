"""Zyphra's Zaya: attention whose q and k pass convolutions, routers that are MLPs, and one expert or none for each token.

    model.layers.{l}.self_attn.qkv_proj.{q_proj, k_proj, v_proj_current, v_proj_delayed, conv_qk_depthwise, conv_qk_grouped}
    model.layers.{l}.self_attn.qk_norm.temp                                       a factor on the keys of each head
    model.layers.{l}.mlp.gate.{down_proj, router_states_scale, router_mlp, balancing_biases}               the router
    model.layers.{l}.{post_attention_residual_scale, post_mlp_residual_scale}     numbers of both sides of residual sums

Layer 0 has no router_states_scale, since there is no router before it. The last of balancing_biases is that of no expert:
transformers 5.24 sets it to -1 whenever it loads a model, and megaconv keeps the value of the file. Megatron core has no such
layers: these models are converted between Hugging Face's files. Source: ZayaConfig and modeling_zaya.py of transformers 5.24.
"""

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_size, size
from megaconv.families.parts.layer_mixers import LAYER_TYPES
from megaconv.families.parts.layer_ropes import partial_layer_ropes
from megaconv.families.parts.row_changes import hf_only, with_head_bias
from megaconv.families.parts.windows import windows_by_words
from megaconv.model.table import Row, Stacked

_HF, _OWN = "model.layers.{l}.", "layers.{l}."
_QKV, _ROUTER, _EXPERTS = _HF + "self_attn.qkv_proj.", _HF + "mlp.gate.", _HF + "mlp.experts."
_CONV, _OWN_ROUTER = _OWN + "attn.conv_", _OWN + "mlp.router."
_INPUT_NORM, *_, _OUT, _OUT_BIAS = ATTENTION
_ATTENTION = (
    _INPUT_NORM,
    Row(_OWN + "attn.{q|k}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden"),
        hf=_QKV + "{q_proj|k_proj}.weight"),
    Row(_OWN + "attn.{q|k}.bias", ("heads*head_dim", "kv_heads*head_dim"), when="qkv_bias",
        hf=_QKV + "{q_proj|k_proj}.bias"),
    Row(_OWN + "attn.{v|earlier_v}.weight", ("half_values hidden",) * 2,
        hf=_QKV + "{v_proj_current|v_proj_delayed}.weight"),
    Row(_OWN + "attn.{v|earlier_v}.bias", ("half_values",) * 2, when="qkv_bias",
        hf=_QKV + "{v_proj_current|v_proj_delayed}.bias"),
    Row(_CONV + "channels.weight", ("qk_channels 1 channel_conv",), when="convolved_attention",
        hf=_QKV + "conv_qk_depthwise.weight"),
    Row(_CONV + "heads.weight", ("qk_channels head_dim head_conv",), when="convolved_attention",
        hf=_QKV + "conv_qk_grouped.weight"),
    Row(_CONV + "{channels|heads}.bias", ("qk_channels",) * 2, when="convolved_attention",
        hf=_QKV + "{conv_qk_depthwise|conv_qk_grouped}.bias"),
    Row(_OWN + "attn.k_scale", ("kv_heads",), when="convolved_attention", hf=_HF + "self_attn.qk_norm.temp"),
    _OUT,
    _OUT_BIAS,
)  # fmt: skip
_ROUTERS = (
    Row(_OWN_ROUTER + "in.weight", ("router_width hidden",), when="moe router_mlp", hf=_ROUTER + "down_proj.weight"),
    Row(_OWN_ROUTER + "in.bias", ("router_width",), when="moe router_mlp", hf=_ROUTER + "down_proj.bias"),
    Row(_OWN_ROUTER + "earlier_scale", ("router_width",), when="moe router_mlp later_layer", hf=_ROUTER + "router_states_scale"),
    Row(_OWN_ROUTER + "norm.weight", ("router_width",), when="moe router_mlp", hf=_ROUTER + "router_mlp.norm.weight"),
    Row(_OWN_ROUTER + "{fc1|fc2}.weight", ("router_width router_width",) * 2, when="moe router_mlp",
        hf=_ROUTER + "router_mlp.{fc1|fc2}.weight"),
    Row(_OWN_ROUTER + "{fc1|fc2}.bias", ("router_width",) * 2, when="moe router_mlp",
        hf=_ROUTER + "router_mlp.{fc1|fc2}.bias"),
    Row(_OWN_ROUTER + "weight", ("routes router_width",), when="moe router_mlp", hf=_ROUTER + "router_mlp.out_proj.weight"),
    Row(_OWN_ROUTER + "bias", ("routes",), when="moe router_bias", hf=_ROUTER + "balancing_biases"),
)  # fmt: skip
_MLP = (
    MOE_NORM,
    *_ROUTERS,
    Row(_OWN + "mlp.experts.{e}.{gate|up}.weight", ("moe_ffn hidden",) * 2, tp=0, when="moe",
        hf=Stacked(_EXPERTS + "gate_up_proj")),
    Row(_OWN + "mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=Stacked(_EXPERTS + "down_proj")),
)  # fmt: skip
_SIDES = "{hidden_states_bias|hidden_states_scale|residual_bias|residual_scale}"
_OWN_SIDES = "{output_shift|output_scale|input_shift|input_scale}"
_RESIDUALS = (
    Row("embed_{shift|scale}", ("hidden",) * 2, stage="first", when="affine_residuals",
        hf="model.input_hidden_states_{bias|scale}"),
    Row(_OWN + "attn." + _OWN_SIDES, ("hidden",) * 4, when="affine_residuals",
        hf=_HF + "post_attention_residual_scale." + _SIDES),
    Row(_OWN + "mlp." + _OWN_SIDES, ("hidden",) * 4, when="affine_residuals",
        hf=_HF + "post_mlp_residual_scale." + _SIDES),
)  # fmt: skip
ROWS = hf_only(with_head_bias((EMBEDDING, *_ATTENTION, *_MLP, *_RESIDUALS, *HEAD)))

KINDS = ("hybrid", "hybrid_sliding")


def _read_width(raw: Raw) -> Fields:
    width = need_size(raw, "moe_intermediate_size", 2048)
    return {"mlp.ffn": width, "experts.ffn": width}


def _require_ropes(raw: Raw) -> None:
    """Raise CorruptCheckpoint if rope_parameters lacks a kind of layers that the model has: the class takes no default then."""
    stated = raw.get("rope_parameters")
    kinds = [kind for kind in KINDS if kind in (raw.get(LAYER_TYPES) or KINDS[:1])]
    missing = [kind for kind in kinds if isinstance(stated, dict) and not stated.get(kind)]
    if missing:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: rope_parameters has nothing for {missing[0]}, expected an object with rope_theta: {LAYER_TYPES} names "
            "such layers"
        )


_USUAL_ROPES = partial_layer_ropes((5e6, 0.5), (1e4, 0.5), missing_share=1.0, kinds=KINDS)


def _read_ropes(raw: Raw) -> Fields:
    _require_ropes(raw)
    return _USUAL_ROPES.read(raw)


_ROPES = Keys(_USUAL_ROPES.names, _read_ropes, _USUAL_ROPES.write)
_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "vocab_size": 262272,
}
_BODY = decoder_keys(
    positions=131072,
    kv_heads=2,
    head_dim=128,
    epsilon=1e-5,
    rotation=_ROPES,
    tied=True,
    tokens=(2, 106, 0),
)
_KEYS = (
    *with_defaults(without_keys(_BODY, "intermediate_size", "partial_rotary_factor"), _DEFAULTS),
    ATTENTION_BIASES,
    windows_by_words(KINDS, "sliding_window", lambda raw, layers: ["hybrid"] * layers, layers=40),
    size("cca_time0", "convolved.channels", 2),
    size("cca_time1", "convolved.heads", 2),
    size("num_experts", "experts.count", 16),
    size("router_hidden_size", "experts.router_width", 256),
    Keys(
        ("moe_intermediate_size",),
        _read_width,
        lambda config: {"moe_intermediate_size": config.experts.ffn},
    ),
    flags("lm_head_bias", ("head.bias",), default=False),
)
_FIXED = {
    **LLAMA_LIKE,
    "affine_residuals": True,
    "layers.mlp": "experts",
    "experts.per_token": 1,
    "experts.optional": True,
    "experts.renormalize": False,
    "experts.router_bias": True,
}

FAMILY = Family(
    name="zaya",
    architectures=("ZayaForCausalLM",),
    model_type="zaya",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "num_experts_per_tok": 1},
    recognized=None,
    proven="names",
)
