"""Kimi K3's language model: Kimi delta attention, gated latent attention, experts in a latent space, attention residuals.

    hf     model.layers.{l}.{self_attention_res_norm, input_layernorm, self_attn, mlp_res_norm, ..., block_sparse_moe}

No release of transformers has this class. Its config.json has the class name and the model_type of Kimi Linear, whose files
it extends. A_log has more elements in the published files than there are heads: zeros follow. These models are converted
between Hugging Face's files. Sources: the remote code of moonshotai/Kimi-K3 as SGLang, Megatron-Bridge and others restate it
(defaults: KimiLinearConfig of SGLang), and the names, shapes and bytes of the published files.
"""

from collections.abc import Mapping
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.kimi_linear import KDA, OWN_HEAD
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, body_keys
from megaconv.families.parts.decoder_rows import HEAD, MLP
from megaconv.families.parts.deepseek_experts import (
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    first_dense,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.experts import MOE_NORM, shared_expert_rows
from megaconv.families.parts.kda_config import (
    KDA_CONFIG,
    LISTS,
    WORDS,
    is_kimi_k3,
    kda_config,
    layer_lists,
    words_of_lists,
)
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    need_flag,
    need_number,
    need_size,
    size,
)
from megaconv.families.parts.latent_attention import (
    LATENT_ATTENTION,
    latent_heads,
    require_own_groups,
)
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.row_changes import hf_only, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, one_or_each
from megaconv.model.table import Row

_HF = "model.layers.{l}."
_ATTENTION, _MOE = _HF + "self_attn.", _HF + "block_sparse_moe."
_KEYS_WIDE, _VALUES = "linear_key_heads*linear_key_dim", "linear_value_heads*linear_value_dim"
_OTHER_GATES = ("_down.weight", "_up.weight", ".A_log")
_KDA = tuple(row for row in KDA if not row.canonical.endswith(_OTHER_GATES))
_GATES = (
    Row("layers.{l}.kda.forget_down.weight", ("linear_value_dim hidden",), when="kda",
        hf=_ATTENTION + "f_a_proj.weight"),
    Row("layers.{l}.kda.forget_up.weight", (f"{_KEYS_WIDE} linear_value_dim",), tp=0, when="kda",
        hf=_ATTENTION + "f_b_proj.weight"),
    Row("layers.{l}.kda.gate.weight", (f"{_VALUES} hidden",), tp=0, when="kda full_rank_out_gate",
        hf=_ATTENTION + "g_proj.weight"),
    Row("layers.{l}.kda.gate_down.weight", ("linear_value_dim hidden",), when="kda !full_rank_out_gate",
        hf=_ATTENTION + "g_a_proj.weight"),
    Row("layers.{l}.kda.gate_up.weight", (f"{_VALUES} linear_value_dim",), tp=0, when="kda !full_rank_out_gate",
        hf=_ATTENTION + "g_b_proj.weight"),
    # The heads are followed by zeros, so that ranks can't hold equal shares.
    Row("layers.{l}.kda.A_log", ("stored_decays",), when="kda",
        hf=_ATTENTION + "A_log"),
    Row("layers.{l}.attn.gate.weight", ("heads*v_dim hidden",), tp=0, when="attention output_gate",
        hf=_ATTENTION + "g_proj.weight"),
)  # fmt: skip
_RESIDUALS = (
    Row("layers.{l}.{mixer|mlp}_residual.norm.weight", ("hidden", "hidden"), when="attention_residuals",
        hf=_HF + "{self_attention|mlp}_res_norm.weight"),
    Row("layers.{l}.{mixer|mlp}_residual.query.weight", ("1 hidden", "1 hidden"), when="attention_residuals",
        hf=_HF + "{self_attention|mlp}_res_proj.weight"),
    Row("final_residual.norm.weight", ("hidden",), stage="last", when="attention_residuals",
        hf="model.output_attn_res_norm.weight"),
    Row("final_residual.query.weight", ("1 hidden",), stage="last", when="attention_residuals",
        hf="model.output_attn_res_proj.weight"),
)  # fmt: skip
_EXPERTS = (
    MOE_NORM,
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
        hf=_MOE + "gate.weight"),
    ROUTER_BIAS.renamed(hf=_MOE + "gate.e_score_correction_bias"),
    Row("layers.{l}.mlp.latent.down.weight", ("expert_latent hidden",), when="moe expert_latent",
        hf=_MOE + "routed_expert_down_proj.weight"),
    Row("layers.{l}.mlp.latent.norm.weight", ("expert_latent",), when="moe expert_latent_norm",
        hf=_MOE + "routed_expert_norm.weight"),
    Row("layers.{l}.mlp.latent.up.weight", ("hidden expert_latent",), when="moe expert_latent",
        hf=_MOE + "routed_expert_up_proj.weight"),
    Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn expert_hidden", "moe_ffn expert_hidden"), tp=0, when="moe",
        hf=_MOE + "experts.{e}.{w1|w3}.weight"),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("expert_hidden moe_ffn",), tp=1, when="moe",
        hf=_MOE + "experts.{e}.w2.weight"),
    *shared_expert_rows(
        "block_sparse_moe.shared_experts.{gate_proj|up_proj}.weight", "block_sparse_moe.shared_experts.down_proj.weight"
    ),
)  # fmt: skip
_MIXERS = (*_KDA, *rows_of("attention", LATENT_ATTENTION), *_GATES)
ROWS = hf_only((OWN_HEAD, *_MIXERS, *without_biases(MLP), *_EXPERTS, *_RESIDUALS, *HEAD))

_SIZES = ("num_heads", "head_dim", "short_conv_kernel_size")
_FULL_RANK, _BOUND = "use_full_rank_gate", "gate_lower_bound"


def _read_linear(raw: Raw) -> Fields:
    stated = kda_config(raw, *_SIZES, _FULL_RANK, _BOUND)
    if any(key not in stated for key in LISTS):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {KDA_CONFIG} should have {' and '.join(LISTS)}, found {', '.join(stated) or 'nothing'}"
        )
    words = words_of_lists(stated, need_size(raw, "num_hidden_layers"))
    mixers = tuple(WORDS[word] for word in words)
    sizes = _read_sizes(stated) if "kda" in mixers else {}
    return {"layers.mixer": one_or_each(mixers), **sizes}


def _read_sizes(stated: Raw) -> Fields:
    heads, width, positions = (need_size(stated, key) for key in _SIZES)
    bound = stated.get(_BOUND)
    return {
        "linear.key_heads": heads,
        "linear.value_heads": heads,
        "linear.key_dim": width,
        "linear.value_dim": width,
        "linear.conv": positions,
        "linear.full_rank_out_gate": bool(stated.get(_FULL_RANK, False)),
        "linear.forget_bound": None if bound is None else need_number(stated, _BOUND, 0.0),
        # The published files have 128 elements for 96 heads of 128. `complete` corrects it for other files.
        "linear.stored_decays": max(heads, width),
    }


def _write_linear(config: ModelConfig) -> Raw:
    linear = config.linear
    written: dict[str, Any] = dict(layer_lists(config))
    if config.has("kda_layers"):
        sizes = (linear.value_heads, linear.value_dim, linear.conv)
        written |= dict(zip(_SIZES, sizes, strict=True))
        written |= {_FULL_RANK: linear.full_rank_out_gate, _BOUND: linear.forget_bound}
    return {KDA_CONFIG: written}


def _with_stored_decays(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """The model with the size that A_log has in these files: that of the heads, or more."""
    sizes = [
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(".self_attn.A_log") and len(tensor.shape) == 1
    ]
    largest = max(sizes, default=0)
    if largest < config.linear.value_heads:
        return config  # the comparison of shapes names the tensor that is too short
    return changed(config, {"linear.stored_decays": largest})


_LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_HEAD_KEYS = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", *_LATENT_SIZES)
_HEADS = latent_heads(kv_rank=512, q_rank=0, rope=64, nope=128, v=128)


def _read_heads(raw: Raw) -> Fields:
    for key in _LATENT_SIZES:
        need_size(raw, key)  # the class has no defaults of these
    if raw.get("num_key_value_heads") is not None:
        require_own_groups(raw["num_key_value_heads"], raw.get("num_attention_heads"))
    return _HEADS.read(raw)


def _write_heads(config: ModelConfig) -> Raw:
    """Without head_dim, which the class doesn't compute with."""
    written = _HEADS.write(config)
    return {key: value for key, value in written.items() if key in _HEAD_KEYS}


_BETA, _LINEAR_BETA = "activation_situ_beta", "activation_situ_linear_beta"


def _cap(raw: Raw, key: str, default: float | None) -> float | None:
    """The positive number of a key; the default for null."""
    if raw.get(key) is None:
        return default
    cap = need_number(raw, key, 0.0)
    if cap <= 0:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a positive number, found {cap!r}")
    return cap


def _read_caps(raw: Raw) -> Fields:
    return {"mlp.situ_cap": _cap(raw, _BETA, 1.0), "mlp.linear_cap": _cap(raw, _LINEAR_BETA, None)}


def _write_caps(config: ModelConfig) -> Raw:
    return {_BETA: config.mlp.situ_cap, _LINEAR_BETA: config.mlp.linear_cap}


_LATENT, _NORM = "routed_expert_hidden_size", "latent_moe_use_norm"


def _read_latent(raw: Raw) -> Fields:
    latent = 0 if raw.get(_LATENT) is None else need_size(raw, _LATENT)
    if raw.get(_NORM) and not latent:
        raise NotExpressible(f"{CONFIG_NAME}: {_NORM} is not supported without {_LATENT}")
    return {"experts.latent": latent, "experts.latent_norm": need_flag(raw, _NORM, False)}


def _write_latent(config: ModelConfig) -> Raw:
    return {_LATENT: config.experts.latent or None, _NORM: config.experts.latent_norm}


_BLOCK = "attn_res_block_size"


def _read_block(raw: Raw) -> Fields:
    return {"residual_block": 0 if raw.get(_BLOCK) is None else need_size(raw, _BLOCK)}


_BODY = body_keys(positions=4096, ffn=11008, epsilon=1e-6, tokens=(1, 2, 0))
_KEYS = (
    *with_defaults(
        without_keys(_BODY, "rope_theta", "partial_rotary_factor", "tie_word_embeddings"),
        {"vocab_size": 163840},
    ),
    Keys(_HEAD_KEYS, _read_heads, _write_heads),
    Keys((KDA_CONFIG,), _read_linear, _write_linear),
    choice("mla_use_nope", "positions.kind", {True: "none"}, False),
    flags("mla_use_output_gate", ("attention.output_gate",), default=False),
    choice("hidden_act", "mlp.activation", {"situ": "situ"}, "silu"),
    Keys((_BETA, _LINEAR_BETA), _read_caps, _write_caps),
    first_dense(0),
    size("num_experts", "experts.count"),
    size("num_experts_per_token", "experts.per_token"),
    size("moe_intermediate_size", "experts.ffn"),
    shared_experts(count=0, width=3072, key="num_shared_experts"),
    Keys((_LATENT, _NORM), _read_latent, _write_latent),
    *sigmoid_routing(
        scale=1.0, groups=1, group_topk=1, groups_key="num_expert_group", renormalize_key="moe_renormalize"
    ),
    Keys((_BLOCK,), _read_block, lambda config: {_BLOCK: config.residual_block or None}),
)  # fmt: skip
_FIXED = {**LLAMA_LIKE, **SIGMOID_ROUTER}
_ONLY = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}

FAMILY = Family(
    name="kimi_k3",
    architectures=("KimiLinearForCausalLM",),
    model_type="kimi_linear",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases={"n_routed_experts": "num_experts"},
    features=("mla",),
    describes=is_kimi_k3,
    complete=_with_stored_decays,
    recognized=None,
    proven="names",
)
