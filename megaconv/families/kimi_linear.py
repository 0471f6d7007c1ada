"""Kimi Linear 48B-A3B: Kimi delta attention, latent attention without positions in every fourth layer, and experts.

    hf     model.layers.{l}.{input_layernorm, self_attn, post_attention_layernorm, mlp, block_sparse_moe}

A delta net's state forgets each head by itself, Kimi delta attention's each channel of a key (f_a_proj, f_b_proj).
transformers 5.23 saves the MLP of dense layers as block_sparse_moe too. megaconv reads both names. Megatron core has no such
layers: these models are converted between Hugging Face's files, and trained; core's names are those of the trainer's
checkpoints. Source: KimiLinearConfig and modeling_kimi_linear.py of transformers 5.23.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_SHARED,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.experts import MOE_NORM, expert_rows, shared_expert_rows
from megaconv.families.parts.kda_config import (
    KDA_CONFIG,
    LISTS,
    WORDS,
    is_kimi_linear,
    kda_config,
    layer_lists,
    words_of_lists,
)
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
from megaconv.families.parts.latent_attention import LATENT_ATTENTION, LATENT_NORMS, latent_heads
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.row_changes import in_core, respelled, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.table import AsVector, Copied, Fused, Row, Spelling

_HF, _CORE = "model.layers.{l}.self_attn.", "decoder.layers.{l}.self_attention."
_MOE = "block_sparse_moe."
_KEYS_WIDE, _VALUES = "linear_key_heads*linear_key_dim", "linear_value_heads*linear_value_dim"
KDA = (
    Row("layers.{l}.input_norm.weight", ("hidden",), when="kda",
        hf="model.layers.{l}.input_layernorm.weight",
        core="decoder.layers.{l}.input_layernorm.weight"),
    Row("layers.{l}.kda.{q|k|v|write}.weight",
        (f"{_KEYS_WIDE} hidden", f"{_KEYS_WIDE} hidden", f"{_VALUES} hidden", "linear_value_heads hidden"), tp=0, when="kda",
        hf=_HF + "{q|k|v|b}_proj.weight",
        core=Fused(_CORE + "linear_qkvb.weight")),
    Row("layers.{l}.kda.conv.{q|k|v}.weight", (f"{_KEYS_WIDE} 1 linear_conv", f"{_KEYS_WIDE} 1 linear_conv", f"{_VALUES} 1 linear_conv"),
        tp=0, when="kda",
        hf=_HF + "{q|k|v}_conv1d.weight",
        core=Fused(_CORE + "conv1d.weight")),
    Row("layers.{l}.kda.{forget|gate}_down.weight", ("linear_value_dim hidden", "linear_value_dim hidden"), when="kda",
        hf=_HF + "{f|g}_a_proj.weight",
        core=Fused(_CORE + "linear_gates_down.weight")),
    Row("layers.{l}.kda.{forget|gate}_up.weight", (f"{_KEYS_WIDE} linear_value_dim", f"{_VALUES} linear_value_dim"), tp=0, when="kda",
        hf=_HF + "{f|g}_b_proj.weight",
        core=_CORE + "linear_{forget|gate}_up.weight"),
    Row("layers.{l}.kda.dt_bias", (_KEYS_WIDE,), tp=0, when="kda",
        hf=_HF + "dt_bias",
        core=_CORE + "dt_bias"),
    Row("layers.{l}.kda.A_log", ("1 1 linear_value_heads 1",), tp=2, when="kda",
        hf=_HF + "A_log",
        core=AsVector(_CORE + "A_log")),
    Row("layers.{l}.kda.out_norm.weight", ("linear_value_dim",), when="kda",
        hf=_HF + "o_norm.weight",
        core=_CORE + "out_norm.weight"),
    Row("layers.{l}.kda.o.weight", (f"hidden {_VALUES}",), tp=1, when="kda",
        hf=_HF + "o_proj.weight",
        core=_CORE + "out_proj.weight"),
)  # fmt: skip
"""The rows of Kimi delta attention, with the norm before it."""
CLASS_NAMES: dict[str, dict[str, Spelling]] = {
    "layers.{l}.kda.conv.{q|k|v}.weight": {"hf_stacked": Fused(_HF + "conv1d.weight")},
    "layers.{l}.kda.{forget|gate}_down.weight": {"hf_stacked": _HF + "{forget_gate.f|g}_a_proj.weight"},
    "layers.{l}.kda.{forget|gate}_up.weight": {"hf_stacked": _HF + "{forget_gate.f|g}_b_proj.weight"},
    "layers.{l}.kda.dt_bias": {"hf_stacked": _HF + "forget_gate.dt_bias"},
}  # fmt: skip
"""The names of transformers' classes, whose gate of the state is a module."""
_DECAYS: dict[str, dict[str, Spelling]] = {
    "layers.{l}.kda.A_log": {"hf_stacked": _HF + "forget_gate.A_log"}
}
_EXPERTS = (
    MOE_NORM,
    *expert_rows(_MOE + "gate.weight", _MOE + "experts.{e}.{w1|w3}.weight", _MOE + "experts.{e}.w2.weight"),
    ROUTER_BIAS.renamed(hf=f"model.layers.{{l}}.{_MOE}gate.e_score_correction_bias", hf_stacked=ROUTER_BIAS.names["hf"]),
    *(
        row.renamed(hf_stacked=usual.names["hf"])
        for row, usual in zip(
            shared_expert_rows(
                _MOE + "shared_experts.{gate_proj|up_proj}.weight", _MOE + "shared_experts.down_proj.weight"
            ),
            DEEPSEEK_SHARED, strict=True,
        )
    ),
)  # fmt: skip
OWN_HEAD = replace(
    EMBEDDING,
    copies=(
        Copied(
            "head", {"hf": ("lm_head.weight",), "core": ("output_layer.weight",)}, untied=("hf",)
        ),
    ),
)
"""The embedding's row. transformers' class reads the head from the file although tie_word_embeddings is true."""
_MIXERS = (*respelled(KDA, CLASS_NAMES | _DECAYS), *rows_of("attention", LATENT_ATTENTION))
ROWS = in_core((OWN_HEAD, *_MIXERS, *without_biases(MLP), *_EXPERTS, *HEAD))

_DENSE = re.compile(r"(.+)\.block_sparse_moe\.((?:gate|up|down)_proj\..+)")


def _usual_names(names: Collection[str]) -> Mapping[str, str]:
    """The MLPs of dense layers by their usual names."""
    found = ((name, _DENSE.fullmatch(name)) for name in names)
    return {name: f"{match[1]}.mlp.{match[2]}" for name, match in found if match}


_SIZES = {
    "num_heads": ("linear_num_heads", 32),
    "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
"""Key in linear_attn_config -> (transformers' key for the same size, its default)."""


def _read_sizes(raw: Raw) -> Fields:
    stated = kda_config(raw, *_SIZES)
    heads, width, positions = (
        need_size(stated if inner in stated else raw, inner if inner in stated else key, usual)
        for inner, (key, usual) in _SIZES.items()
    )
    sizes = {"linear.key_heads": heads, "linear.value_heads": heads, "linear.conv": positions}
    return {**sizes, "linear.key_dim": width, "linear.value_dim": width}


def _write_sizes(config: ModelConfig) -> Raw:
    """Both forms: the Hub's, which numbers layers from 1, and that of transformers 5.23."""
    linear = config.linear
    sizes = dict(zip(_SIZES, (linear.value_heads, linear.value_dim, linear.conv), strict=True))
    flat = {key: sizes[inner] for inner, (key, _) in _SIZES.items()}
    return {KDA_CONFIG: {**sizes, **layer_lists(config)}, **flat}


def _words(raw: Raw, layers: int) -> list[str]:
    """The words for the layers by linear_attn_config, or of transformers' default."""
    stated = kda_config(raw, *_SIZES)
    linear, full = WORDS
    if any(key not in stated for key in LISTS):
        return [full if layer and layer % 4 == 0 else linear for layer in range(layers)]
    return words_of_lists(stated, layers)


_BODY = body_keys(positions=1048576, ffn=9216, epsilon=1e-5, tokens=(163584, 163586, 163839))
_KEYS = (
    *without_keys(_BODY, "max_position_embeddings", "rope_theta", "partial_rotary_factor"),
    size("model_max_length", "max_positions", 1048576),
    latent_heads(kv_rank=512, q_rank=0, rope=64, nope=128, v=128),
    layer_mixers(WORDS, _words),
    Keys((KDA_CONFIG, *(key for key, _ in _SIZES.values())), _read_sizes, _write_sizes),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    *routed_experts(
        count=256, width=1024, count_key="num_experts", per_token_key="num_experts_per_token"
    ),
    shared_experts(count=1, width=1024, key="num_shared_experts"),
    *sigmoid_routing(
        scale=2.446, groups=1, group_topk=1, groups_key="num_expert_group", renormalize_key="moe_renormalize"
    ),
)  # fmt: skip
_FIXED = {**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS, "positions.kind": "none"}
_ONLY = {
    **SILU,
    "attention_bias": False,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
}
_ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

FAMILY = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    model_type="kimi_linear",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases=_ALIASES,
    ignored=ROPE_FREQUENCIES,
    features=("mla",),
    other_names=_usual_names,
    recognized=None,
    proven="names",
    describes=is_kimi_linear,
)
