"""Small models of transformers, random in every weight, and how to load, run and compare them.

All are float32, have a vocabulary that needs padding, and an epsilon and rotary base that are nobody's default, so that
whatever is lost on the way moves the logits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megaconv.families import families

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

LAYERS, VOCAB = 4, 131
WINDOW = 7
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
}
GPT2_SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_inner": 88,
    "n_layer": LAYERS,
    "n_head": 8,
    "vocab_size": VOCAB,
    "n_positions": 96,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": 3,
    "eos_token_id": 4,
}
OTHER_EPSILONS = ("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
"""The key of epsilon in architectures with LayerNorm."""
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}


@dataclass(frozen=True)
class Variant:
    """A kind of model, and what else its configuration could say: each of these has to give other logits."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    """The layouts that it is run at, where not at all of them."""
    quick: tuple[str, ...] = ()
    """The variants that are not slow, if others are."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Options of the saver that this release of Megatron needs."""


QUICK, QUICK_WITH_EXPERTS = ("tp2 pp2",), ("tp2 pp1 ep2",)
FEW = ("tp2 pp2, layers 1+3", "tp4 pp1, release")
MANY_RANKS = ("tp4 pp1, release", "tp2 pp2")
ALL_SLOW = ("",)
"""No layout is quick."""
ONE_WITH_EXPERTS = ("tp2 pp1 ep2",)


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """Rope keys as transformers 5 writes them."""
    return {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}}


def windows(first: int) -> dict[str, Any]:
    """A sliding window on all layers from this one on."""
    return {"layer_types": ["full_attention"] * first + ["sliding_attention"] * (LAYERS - first)}


def rope_of_none() -> dict[str, Any]:
    """Rope keys of an OLMo Hybrid without positions."""
    return {"rope_parameters": {"rope_type": None, "rope_theta": None}}


def rope_of(theta: float, **scaling: Any) -> dict[str, Any]:
    """Rope keys of one kind of layers."""
    return {"rope_type": "default", **scaling, "rope_theta": theta}


def two_ropes(full: dict[str, Any] | None, windowed: dict[str, Any] | None) -> dict[str, Any]:
    """Rope keys as transformers 5 writes them if layers with a window have their own."""
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


def entry_ropes(
    theta: float = 5000.0, entry_theta: float = 700.0, share: float = 0.5, **scaling: Any
) -> dict[str, Any]:
    """Rope keys as transformers 5 writes them for a DeepSeek V4."""
    main = rope_of(theta, partial_rotary_factor=share)
    return {
        "rope_parameters": {
            "main": main,
            "compress": {**main, "rope_theta": entry_theta, **scaling},
        }
    }


def ropes_of_zaya(
    full: float = 5000.0, windowed: float = 700.0, share: float = 0.5, **scaling: Any
) -> dict[str, Any]:
    """Rope keys as transformers 5 writes them for a Zaya. share: of heads in layers with a window."""
    ropes = {
        "hybrid": rope_of(full, partial_rotary_factor=0.5, **scaling),
        "hybrid_sliding": rope_of(windowed, partial_rotary_factor=share),
    }
    return {"rope_parameters": ropes}


def every_other_window() -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}


HALF_ROTATES = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
OLMO_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
PLAIN_YARN = {**OLMO_YARN, "attention_factor": 1.0}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 5, "sliding_window": WINDOW}
GEMMA_OTHERS = {"scale": {"query_pre_attn_scalar": 12}, "one less": {"sliding_window": WINDOW - 1}}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MAMBA: dict[str, Any] = {
    "head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "ssm_state_size": 5,
}
MIXED: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 5,
}
MAMBA2: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 4,
    "state_size": 5,
    "time_step_limit": (0.0, float("inf")),
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "whole heads rotate": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 1.0,
        }
    },
    "epsilon": {"rms_norm_eps": 1e-2},
}

MOLMO: dict[str, Any] = {"head_dim": 12, "additional_vocab_size": 13, **rope(5000.0, **OLMO_YARN)}
NORMS_OF_MOLMO = {"norms after": {"norm_after": True}, "no scaling": rope(5000.0)}

VARIANTS = {
    "llama": Variant("llama", others={"epsilon": {"rms_norm_eps": 1e-5}, "rotary base": rope(10000.0)}),
    "llama, as many kv heads as heads": Variant("llama", {"num_key_value_heads": 8}),
    "llama, tied, rope scaling of llama 3": Variant(
        "llama",
        {"tie_word_embeddings": True, **rope(500000.0, **LLAMA3)},
        {
            "no scaling": rope(500000.0),
            "factor 8": rope(500000.0, **LLAMA3 | {"factor": 8.0}),
            "other range": rope(500000.0, **LLAMA3 | {"original_max_position_embeddings": 4096}),
        },
    ),
    "llama, linear rope scaling": Variant(
        "llama",
        rope(5000.0, rope_type="linear", factor=2.5),
        {"no scaling": rope(5000.0), "factor 2": rope(5000.0, rope_type="linear", factor=2.0)},
    ),
    "llama, yarn": Variant("llama", rope(5000.0, **YARN), {"no scaling": rope(5000.0)}, ("tp2 pp2",)),
    "llama, head_dim of its own": Variant("llama", {"head_dim": 12}),
    "llama, all biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Variant(
        "mistral",
        {"sliding_window": WINDOW},
        {
            "no window": {"sliding_window": None},
            "one less": {"sliding_window": WINDOW - 1},
            "one more": {"sliding_window": WINDOW + 1},
        },
    ),
    "mistral, no window, head_dim of its own": Variant("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": Variant("qwen2"),
    "qwen2, tied": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen2, fewer kv heads than ranks": Variant("qwen2", {"num_key_value_heads": 2}, layouts=MANY_RANKS),
    "qwen2, window on the last layer": Variant(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": LAYERS - 1},
        {"no window": windows(LAYERS), "on two layers": windows(LAYERS - 2)},
    ),
    "qwen3": Variant("qwen3", {"head_dim": 12}),
    "qwen3, fewer kv heads than ranks": Variant(
        "qwen3", {"num_key_value_heads": 2, "head_dim": 12}, layouts=MANY_RANKS
    ),
    "qwen3, tied": Variant("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": Variant(
        "phi3",
        {"sliding_window": WINDOW, "original_max_position_embeddings": 96},
        {"no window": {"sliding_window": None}},
    ),
    "phi3, part of each head": Variant(
        "phi3",
        {"original_max_position_embeddings": 96, **rope(5000.0, partial_rotary_factor=0.5)},
        {"whole heads": rope(5000.0, partial_rotary_factor=1.0)},
        QUICK,
    ),
    "gemma": Variant("gemma", {"head_dim": 12, "rms_norm_eps": 1e-3}, {"untied": {"tie_word_embeddings": False}}, FEW),
    "exaone4": Variant(
        "exaone4",
        {"sliding_window": WINDOW, **every_other_window()},
        {"one less": {"sliding_window": WINDOW - 1}, "windows elsewhere": windows(LAYERS - 1)},
        quick=("tp2 pp2, layers 1+3",),
    ),
    "exaone4, no windows": Variant("exaone4", {"sliding_window": None, **windows(LAYERS)}, {}, ("tp4 pp1, release",)),
    "glm4": Variant(
        "glm4",
        {"head_dim": 16, "rope_parameters": HALF_ROTATES},
        {"heads that rotate whole": {"rope_parameters": {**HALF_ROTATES, "partial_rotary_factor": 1.0}}},
        quick=("tp2 pp2",),
    ),
    "olmo2": Variant("olmo2", {}, {"epsilon": {"rms_norm_eps": 1e-5}}, quick=("tp2 pp2, layers 1+3",)),
    "olmo3": Variant(
        "olmo3",
        {"sliding_window": WINDOW, **two_ropes(rope_of(5000.0), rope_of(5000.0))},
        {"one less": {"sliding_window": WINDOW - 1}, "windows elsewhere": windows(LAYERS - 1)},
        quick=("tp1 pp4",),
    ),
    "olmo3, yarn on the last layer": Variant(
        "olmo3",
        {"sliding_window": WINDOW, **two_ropes(rope_of(5000.0, **OLMO_YARN), rope_of(5000.0))},
        {"no scaling": two_ropes(rope_of(5000.0), rope_of(5000.0))},
        ("tp2 pp2",),
    ),
    "ministral3": Variant(
        "ministral3",
        {"head_dim": 12, **rope(5000.0, **{**YARN, "original_max_position_embeddings": 64}, llama_4_scaling_beta=0.1)},
        {"no scaling": rope(5000.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.0)},
        quick=QUICK,
    ),
    "ministral": Variant(
        "ministral",
        {"head_dim": 12, "sliding_window": WINDOW, **every_other_window()},
        {"one less": {"sliding_window": WINDOW - 1}, "windows elsewhere": windows(LAYERS - 1)},
        quick=QUICK,
    ),
    "cwm": Variant(
        "cwm",
        {"sliding_window": WINDOW, "head_dim": 12, **rope(500000.0, **LLAMA3)},
        {"no scaling": rope(500000.0), "windows elsewhere": windows(LAYERS - 1)},
        quick=QUICK,
    ),
    "internlm3": Variant("internlm3", {"head_dim": 12, "qkv_bias": True, "bias": True}, {"rotary base": rope(10000.0)}, quick=QUICK),
    "iquestcoder": Variant("iquestcoder", {"head_dim": 12}, {"rotary base": rope(10000.0)}, QUICK),
    "helium": Variant("helium", {"head_dim": 8}, {"rotary base": rope(10000.0)}, quick=QUICK),
    "vaultgemma": Variant(
        "vaultgemma",
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
        {**GEMMA_OTHERS, "uncapped scores": {"attn_logit_softcapping": None}, "uncapped logits": {"final_logit_softcapping": None}},
        quick=QUICK,
    ),
    "gemma2": Variant(
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
        {**GEMMA_OTHERS, "uncapped scores": {"attn_logit_softcapping": None}, "uncapped logits": {"final_logit_softcapping": None}},
        quick=("tp2 pp2, layers 1+3",),
    ),
    "gemma3_text": Variant(
        "gemma3_text",
        {**GEMMA, "layer_types": GEMMA_LAYERS, **two_ropes(rope_of(5000.0), rope_of(200.0))},
        {**GEMMA_OTHERS, "one base": two_ropes(rope_of(5000.0), rope_of(5000.0))},
        quick=("tp2 pp2",),
    ),
    "gemma3_text, scaled": Variant(
        "gemma3_text",
        {**GEMMA, "layer_types": GEMMA_LAYERS, **two_ropes(rope_of(5000.0, rope_type="linear", factor=4.0), rope_of(200.0))},
        {"no scaling": two_ropes(rope_of(5000.0), rope_of(200.0))},
        ("tp2 pp2",),
    ),
    "qwen3_5": Variant("qwen3_5_text", DELTA_NET, ROTATIONS, ("tp2 pp2, layers 1+3",)),
    "gpt2": Variant("gpt2", {"activation_function": "gelu_new"}),
    "gpt2, exact gelu": Variant("gpt2", {"activation_function": "gelu"}),
    "exaone": Variant(
        "exaone", {"layer_norm_epsilon": 1e-3, **rope(5000.0)}, {"epsilon": {"layer_norm_epsilon": 1e-2}, "base": rope(900.0)}, quick=QUICK
    ),
    "seed_oss": Variant("seed_oss", {"head_dim": 12}, {"rotary base": rope(10000.0)}, quick=QUICK),
    "smollm3": Variant(
        "smollm3",
        {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW},
        {"all layers rotate": {"no_rope_layers": [1] * 4}, "one layer more": {"no_rope_layers": [1, 0, 0, 0]},
         "no window": {"layer_types": ["full_attention"] * 4}},
        quick=QUICK,
    ),
    "nemotron": Variant(
        "nemotron",
        {"norm_eps": 1e-3, "head_dim": 16},
        {"epsilon": {"norm_eps": 1e-5}, "whole heads": rope(5000.0, partial_rotary_factor=1.0)},
        quick=QUICK,
    ),
    "starcoder2": Variant(
        "starcoder2",
        {"norm_epsilon": 1e-3, "tie_word_embeddings": True, "sliding_window": WINDOW},
        {"epsilon": {"norm_epsilon": 1e-5}, "no window": {"sliding_window": None}},
        quick=QUICK,
    ),
    "gpt_neox": Variant(
        "gpt_neox",
        {"num_key_value_heads": 8, "layer_norm_eps": 1e-3, "use_parallel_residual": False, **rope(5000.0, partial_rotary_factor=0.5)},
        {"epsilon": {"layer_norm_eps": 1e-5}, "whole heads": rope(5000.0, partial_rotary_factor=1.0)},
        quick=QUICK,
    ),
    "stablelm": Variant(
        "stablelm",
        {"layer_norm_eps": 1e-3, "use_qkv_bias": True, **rope(5000.0, partial_rotary_factor=0.5)},
        {"epsilon": {"layer_norm_eps": 1e-5}, "whole heads": rope(5000.0, partial_rotary_factor=1.0)},
        quick=QUICK,
    ),
    "jais2": Variant("jais2", {"layer_norm_eps": 1e-3}, {"epsilon": {"layer_norm_eps": 1e-5}}, quick=QUICK),
    "arcee": Variant("arcee", {}, {"another activation": {"hidden_act": "relu"}}, quick=QUICK),
    "glm": Variant("glm", {"head_dim": 16}, {"whole heads": rope(5000.0, partial_rotary_factor=1.0)}, quick=QUICK),
    "ernie4_5": Variant(
        "ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": True}, {"rotary base": rope(10000.0)}, quick=QUICK
    ),
    "mamba2": Variant(
        "mamba2", MAMBA2, {"epsilon": {"layer_norm_epsilon": 1e-2}}, ("tp2 pp2", "tp2 pp2, layers 1+3", "tp4 pp1, release"), QUICK,
    ),
    "nemotron_h": Variant(
        "nemotron_h", {**MAMBA, "hybrid_override_pattern": "M*-M"}, {"epsilon": {"layer_norm_epsilon": 1e-2}},
        ("tp2 pp2", "tp2 pp2, layers 1+3", "tp4 pp1, release"), QUICK,
    ),
    "bamba": Variant(
        "bamba", {**MIXED, "attn_layer_indices": [1], "rms_norm_eps": 1e-5},
        {"attention elsewhere": {"attn_layer_indices": [2]}, "whole heads": rope(5000.0, partial_rotary_factor=1.0)},
        ("tp2 pp2", "tp1 pp1", "tp4 pp1, release"), QUICK,
    ),
    "gpt_bigcode": Variant("gpt_bigcode", GPT2_SIZES, {"epsilon": {"layer_norm_epsilon": 1e-2}}, QUICK),
}  # fmt: skip
GPT_OSS_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-6,
}
MISTRAL4 = {**LATENT, "n_group": 1, "topk_group": 1}
INDEXER = {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 8}
FOR_0_16 = {"indexer_for": "0.16"}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 88,
    "head_dim": 12,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 0, 1],
    "use_qk_norm": False,
}
LLAMA4_LONG: dict[str, Any] = {
    **LLAMA4,
    "attention_chunk_size": WINDOW,
    "floor_scale": 5,
    "attn_scale": 0.3,
}
MIXTURES = {
    "mixtral": Variant("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": Variant(
        "qwen2_moe",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
        {"weights made to sum up to 1": {"norm_topk_prob": True}},
    ),
    "qwen3_moe": Variant(
        "qwen3_moe",
        {**EXPERTS, "num_experts": 4, "head_dim": 12, "norm_topk_prob": True},
        {"weights left as they are": {"norm_topk_prob": False}},
    ),
    "olmoe": Variant(
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"weights made to sum up to 1": {"norm_topk_prob": True}},
        quick=("tp2 pp1 ep2",),
    ),
    "minimax_m2": Variant(
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "rope_parameters": HALF_ROTATES},
        {"heads that rotate whole": rope(5000.0)},
        quick=("tp2 pp1 ep2",),
    ),
    "mellum": Variant(
        "mellum",
        {**EXPERTS, "num_experts": 4, "head_dim": 12, "sliding_window": WINDOW, "mlp_layer_types": ["dense", "sparse"] * 2,
         **every_other_window(), **two_ropes(rope_of(5000.0), rope_of(200.0))},
        {"one base": two_ropes(rope_of(5000.0), rope_of(5000.0)), "one less": {"sliding_window": WINDOW - 1}},
        quick=QUICK_WITH_EXPERTS,
    ),
    "glm4_moe": Variant(
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 2,
         "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.5},
        {"no factor on the experts": {"routed_scaling_factor": 1.0}},
    ),
    "deepseek_v3": Variant(
        "deepseek_v3", LATENT, {"rotary halves": {"rope_interleave": False}, "one group": {"n_group": 1, "topk_group": 1}}
    ),
    "deepseek_v3, yarn": Variant(
        "deepseek_v3", {**LATENT, **rope(5000.0, **YARN)}, {"no scaling": rope(5000.0)}, ONE_WITH_EXPERTS
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": WINDOW, "swiglu_limit": 0.9,
         "layer_types": ["sliding_attention", "full_attention"] * 2, **rope(5000.0, **GPT_OSS_YARN)},
        {"no clamp": {"swiglu_limit": 7.0}, "no scaling": rope(5000.0), "one less": {"sliding_window": WINDOW - 1},
         "window on the other layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
         "rounded range": rope(5000.0, **GPT_OSS_YARN | {"truncate": True})},
        ("tp1 pp1 ep1", "tp2 pp1 ep2", "tp1 pp2 ep2"),
    ),
    "qwen3_next": Variant(
        "qwen3_next",
        {**EXPERTS, **DELTA_NET, "num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
        {"weights left as they are": {"norm_topk_prob": False}, **ROTATIONS},
        ("tp2 pp1 ep2", "tp1 pp2 ep2"),
    ),
    "qwen3_5_moe": Variant(
        "qwen3_5_moe_text", {**EXPERTS, **DELTA_NET, "num_experts": 4, "shared_expert_intermediate_size": 32}, ROTATIONS,
        ONE_WITH_EXPERTS,
    ),
    "deepseek_v2": Variant(
        "deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None}, {}, ONE_WITH_EXPERTS
    ),
    "mistral4": Variant(
        "mistral4",
        {**MISTRAL4, **rope(5000.0, **{**YARN, "original_max_position_embeddings": 64}, llama_4_scaling_beta=0.1)},
        {"scale": {"routed_scaling_factor": 1.0}}, ONE_WITH_EXPERTS, ALL_SLOW,
    ),
    "llama4": Variant(
        "llama4_text", LLAMA4,
        {"all layers rotate": {"no_rope_layers": [1] * 4, "layer_types": ["chunked_attention"] * 4},
         "norms of q and k": {"use_qk_norm": True}, "one base": rope(10000.0)},
        quick=QUICK_WITH_EXPERTS,
    ),
    "llama4, norms of q and k": Variant(
        "llama4_text", {**LLAMA4, "use_qk_norm": True, "no_rope_layers": [1, 0, 1, 1]},
        {"none": {"use_qk_norm": False}, "epsilon": {"rms_norm_eps": 1e-5}}, ("tp1 pp2 ep2", "tp2 pp1 ep4 etp1"), ("tp1 pp2 ep2",),
    ),
    "deepseek_v32": Variant(
        "deepseek_v32", {**LATENT, **INDEXER},
        {"other half of positions": {"index_topk": 4}, "all positions": {"index_topk": 64}, "rotary base": rope(10000.0)},
        quick=QUICK_WITH_EXPERTS, extra=FOR_0_16,
    ),
    "deepseek_v32, yarn": Variant(
        "deepseek_v32", {**LATENT, **INDEXER, **rope(5000.0, **YARN)}, {"no scaling": rope(5000.0)}, ("tp1 pp2 ep2",), extra=FOR_0_16
    ),
    "glm_moe_dsa": Variant(
        "glm_moe_dsa", {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1},
        {"all positions": {"index_topk": 64}, "no factor on the experts": {"routed_scaling_factor": 1.0}},
        quick=("tp1 pp2 ep2",), extra=FOR_0_16,
    ),
    "glm4_moe_lite": Variant(
        "glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"] * 2},
        {"no factor on the experts": {"routed_scaling_factor": 1.0}}, quick=QUICK_WITH_EXPERTS,
    ),
    "dots1": Variant(
        "dots1",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 1.5, "sliding_window": WINDOW, "max_window_layers": 2},
        {"no window": {"layer_types": ["full_attention"] * 4}, "no factor on the experts": {"routed_scaling_factor": 1.0}},
        quick=QUICK_WITH_EXPERTS,
    ),
    "solar_open": Variant(
        "solar_open",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "head_dim": 12, "routed_scaling_factor": 1.5},
        {"no factor on the experts": {"routed_scaling_factor": 1.0}}, quick=QUICK_WITH_EXPERTS,
    ),
    "hy_v3": Variant(
        "hy_v3",
        {**EXPERTS, "num_experts": 4, "num_shared_experts": 2, "head_dim": 12, "router_scaling_factor": 1.5,
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
        {"no factor on the experts": {"router_scaling_factor": 1.0}}, quick=QUICK_WITH_EXPERTS,
    ),
    "exaone_moe": Variant(
        "exaone_moe",
        {**EXPERTS, "num_experts": 4, "num_shared_experts": 2, "routed_scaling_factor": 1.5, "sliding_window": WINDOW,
         "sliding_window_pattern": 3},
        {"no window, and no layer rotates": {"layer_types": ["full_attention"] * 4}, "one less": {"sliding_window": WINDOW - 1},
         "window on the other layers": {"layer_types": ["full_attention", "sliding_attention"] * 2}},
        quick=QUICK_WITH_EXPERTS,
    ),
    "nemotron_h, experts": Variant(
        "nemotron_h",
        {**MAMBA, "hybrid_override_pattern": "ME*E", "n_routed_experts": 4, "moe_intermediate_size": 48,
         "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5},
        {"no factor on the experts": {"routed_scaling_factor": 1.0}}, ("tp2 pp1 ep2", "tp1 pp2 ep2"), QUICK_WITH_EXPERTS,
    ),
    "nemotron_h, experts in a latent width": Variant(
        "nemotron_h",
        {**MAMBA, "hybrid_override_pattern": "ME*E", "n_routed_experts": 4, "moe_intermediate_size": 48, "moe_latent_size": 20,
         "moe_shared_expert_intermediate_size": 56}, {}, ONE_WITH_EXPERTS,
    ),
    "flint": Variant(
        "flint",
        {**EXPERTS, "num_experts": 4, "head_dim": 12, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1],
         "sliding_window": WINDOW, **every_other_window()},
        {"one less": {"sliding_window": WINDOW - 1}, "weights left as they are": {"norm_topk_prob": False}},
        QUICK_WITH_EXPERTS,
    ),
    "sarvam_moe": Variant(
        "sarvam_moe",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 2.0,
         **rope(5000.0, partial_rotary_factor=1.0)},
        {"scale": {"routed_scaling_factor": 1.0}, "base": rope(900.0, partial_rotary_factor=1.0)}, ONE_WITH_EXPERTS,
    ),
    "sarvam_mla": Variant(
        "sarvam_mla", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, **rope(5000.0, **YARN)},
        {"no scaling": rope(5000.0)}, ONE_WITH_EXPERTS,
    ),
    "lara_mini": Variant(
        "lara_mini",
        {**EXPERTS, **DELTA_NET, "intermediate_size": None, "num_experts": 4, "shared_expert_intermediate_size": 32,
         "sliding_window": WINDOW, "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"]},
        {"one less": {"sliding_window": WINDOW - 1}, "weights left as they are": {"norm_topk_prob": False}, "base": rope(900.0)},
        ONE_WITH_EXPERTS,
    ),
    "aria_text": Variant("aria_text", {"moe_num_experts": 4, "intermediate_size": 40}, {"one expert": {"moe_topk": 1}}, QUICK_WITH_EXPERTS),
}  # fmt: skip
"""Models with experts, for expert parallelism."""
NAMED = {
    "ernie4_5_moe": Variant(
        "ernie4_5_moe", {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 2, "moe_intermediate_size": 48, "use_bias": False}
    ),
}  # fmt: skip
"""Models that no model of Megatron computes. Only names and bytes can be compared."""
LATENT_ALONE = {
    name: LATENT[name]
    for name in (
        *("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
        *("qk_rope_head_dim", "v_head_dim", "rms_norm_eps"),
    )
}
MIXTURES["youtu"] = Variant(
    "youtu", {**LATENT_ALONE, "pad_token_id": None}, {"epsilon": {"rms_norm_eps": 1e-2}}, QUICK
)
"""Dense, with a tensor that is cut by heads, as tests of mixtures read."""
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "shared_intermediate_size": 56,
}
MIXED_LAYERS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
}
# transformers saves the convolution in three parts of one size, whatever the widths of q, k and v. Here, these are equal.
OLMO_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_conv_kernel_dim": 3,
}
LFM2: dict[str, Any] = {
    "conv_L_cache": 4,
    "norm_eps": 1e-3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "tie_word_embeddings": False,
}


def lfm3_ropes(
    theta: float = 5000.0,
    local_theta: float = 700.0,
    share: float = 0.25,
    kind: str = "proportional",
    **scaling: Any,
) -> dict[str, Any]:
    """Rope keys of an LFM 3."""
    full = {"rope_type": kind, "partial_rotary_factor": share, "rope_theta": theta, **scaling}
    return two_ropes(full, rope_of(local_theta))


LFM3: dict[str, Any] = {
    "head_dim": 16,
    "conv_L_cache": 4,
    "norm_eps": 1e-3,
    "sliding_window": WINDOW,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "tie_word_embeddings": False,
    **lfm3_ropes(),
}
GEMMA_4: dict[str, Any] = {
    "head_dim": 12, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    },
}  # fmt: skip
GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GEMMAS_4 = {
    "gemma4_text, layer inputs": Variant(
        "gemma4_text",
        {**GEMMA_4, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB + 1, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True},
        {"one less": {"sliding_window": WINDOW - 1}, "capped logits": {"final_logit_softcapping": 2.0}},
    ),
    "gemma4_unified_text, shared keys and values": Variant(
        "gemma4_unified_text", {**GEMMA_4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}, {"epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "gemma4_text, experts": Variant(
        "gemma4_text", {**GEMMA_4, **GEMMA_4_EXPERTS, "hidden_size_per_layer_input": 0}, {"one expert": {"top_k_experts": 1}}
    ),
    "gemma4_text, keys as values": Variant(
        "gemma4_text",
        {**GEMMA_4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "gemma4_unified_text": Variant(
        "gemma4_unified_text",
        {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"one less": {"sliding_window": WINDOW - 1}, "capped logits": {"final_logit_softcapping": 2.0}},
    ),
}  # fmt: skip
"""Gemma 4, which is converted between Hugging Face's files, and trained."""
_NO_ATTENTION = {"n_heads_in_group": None, "no_op": True}
_NO_MLP = {"ffn_mult": None, "no_op": True}
BLOCKS: list[Any] = [
    {
        "attention": {"n_heads_in_group": 4, "no_op": False},
        "ffn": {"ffn_mult": 6.0, "no_op": False},
    },
    {"attention": _NO_ATTENTION, "ffn": {"ffn_mult": 12.0, "no_op": False}},
    {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": _NO_MLP},
    {
        "attention": {"n_heads_in_group": 4, "no_op": False},
        "ffn": {"ffn_mult": 12.0, "no_op": False},
    },
]
"""Layers of a DeciLM: with other sizes, without attention, and without an MLP."""
DECI: dict[str, Any] = {
    "intermediate_size": None, "num_key_value_heads": None, "block_configs": BLOCKS, **rope(5000.0, **LLAMA3),
}  # fmt: skip
MIMO_V2: dict[str, Any] = {
    **EXPERTS, "n_routed_experts": 8, "num_key_value_heads": 2, "head_dim": 12, "v_head_dim": 10, "sliding_window": WINDOW,
    "routed_scaling_factor": 1.5,
    **two_ropes(rope_of(5000.0, partial_rotary_factor=0.334), rope_of(700.0, partial_rotary_factor=0.5)),
}  # fmt: skip
TWO_SHARES = two_ropes(
    rope_of(5000.0, **OLMO_YARN, partial_rotary_factor=0.5),
    rope_of(700.0, partial_rotary_factor=1.0),
)
LAGUNA: dict[str, Any] = {
    **EXPERTS, **TWO_SHARES, "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 12, "sliding_window": WINDOW,
    "num_attention_heads_per_layer": [8, 4, 12, 4], "moe_routed_scaling_factor": 1.7, **every_other_window(),
}  # fmt: skip
STEP: dict[str, Any] = {
    "head_dim": 16, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2,
    "num_sliding_attention_heads": 16, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "share_expert_dim": 40, "moe_router_scaling_factor": 1.5,
    "swiglu_limits": [0.0, 0.2, 0.0, 0.0], "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.4],
    **two_ropes(rope_of(5000.0, **LLAMA3, partial_rotary_factor=0.5), rope_of(700.0, partial_rotary_factor=1.0)),
}  # fmt: skip
OWN_SIZES = {
    "step3p5": Variant(
        "step3p5", STEP,
        {"one less": {"sliding_window": WINDOW - 1}, "scale": {"moe_router_scaling_factor": 1.0},
         "other scores": {"query_pre_attn_scalar": 4}},
    ),
    "laguna": Variant(
        "laguna", LAGUNA,
        {"one less": {"sliding_window": WINDOW - 1}, "scale": {"moe_routed_scaling_factor": 1.0},
         "same share": two_ropes(rope_of(5000.0, **OLMO_YARN), rope_of(700.0))},
    ),
    "laguna, a gate of each element": Variant("laguna", {**LAGUNA, "gating": "per-element"}, {"epsilon": {"rms_norm_eps": 1e-5}}),
    "nemotron_nas": Variant(
        "nemotron-nas",
        DECI,
        {"epsilon": {"rms_norm_eps": 1e-5}, "base": rope(700.0, **LLAMA3), "no scaling": rope(5000.0)},
    ),
    "mimo_v2_flash": Variant(
        "mimo_v2_flash", {**MIMO_V2, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"one less": {"sliding_window": WINDOW - 1}, "unscaled values": {"attention_value_scale": None},
         "weights left as they are": {"norm_topk_prob": False}, "groups": {"n_group": 4, "topk_group": 1}},
    ),
    "mimo_v2_flash, biases": Variant("mimo_v2_flash", {**MIMO_V2, "attention_bias": True, **every_other_window()}),
}  # fmt: skip
"""Models whose layers have sizes of their own. They are converted between Hugging Face's files, and trained."""
APERTUS = {
    "apertus": Variant(
        "apertus", {},
        {"base": rope(700.0), "llama3": rope(5000.0, **LLAMA3), "epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "apertus, biases": Variant("apertus", {"attention_bias": True}, {"epsilon": {"rms_norm_eps": 1e-5}}),
}  # fmt: skip
"""Apertus, which is converted between Hugging Face's files, and trained."""
KIMI: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 2, "routed_scaling_factor": 1.5,
    "num_expert_group": 2, "topk_group": 1, "linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "model_max_length": 96,
}  # fmt: skip
KIMIS = {
    "kimi_linear": Variant(
        "kimi_linear", KIMI, {"weights left as they are": {"moe_renormalize": False}, "all groups": {"topk_group": 2}},
    ),
    "kimi_linear, queries from a latent vector": Variant(
        "kimi_linear", {**KIMI, "q_lora_rank": 24}, {"epsilon": {"rms_norm_eps": 1e-5}},
    ),
}  # fmt: skip
"""Kimi Linear, which is converted between Hugging Face's files, and trained."""
LFMS_3 = {
    "lfm3": Variant(
        "lfm3", LFM3,
        {"one less": {"sliding_window": WINDOW - 1}, "epsilon": {"norm_eps": 1e-2}, "no gate": {"use_attention_gate": False},
         "no norms after": {"use_sandwich_norm": False}, "larger share": lfm3_ropes(share=0.75), "whole heads": lfm3_ropes(kind="default"),
         "base": lfm3_ropes(theta=900.0), "base in windows": lfm3_ropes(local_theta=5000.0), "slower": lfm3_ropes(factor=2.0),
         "other layers": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}},
    ),
    "lfm3, tied": Variant(
        "lfm3",
        {**LFM3, "tie_word_embeddings": True, "use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True,
         "layer_types": ["full_attention", "conv", "conv", "full_attention"], "rope_parameters": None},
        {"epsilon": {"norm_eps": 1e-2}},
    ),
}  # fmt: skip
"""LFM 3, which is converted between Hugging Face's files, and trained."""
FALCONS_H1 = {
    "falcon_h1": Variant(
        "falcon_h1",
        {**MIXED, "mamba_d_ssm": 128, "key_multiplier": 0.5, "lm_head_multiplier": 0.25, "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.75]},
        {"keys": {"key_multiplier": 2.0}, "attention": {"attention_in_multiplier": 0.5},
         "attention's output": {"attention_out_multiplier": 2.0},
         "mamba": {"ssm_in_multiplier": 2.0}, "mamba's output": {"ssm_out_multiplier": 3.0},
         "parts": {"ssm_multipliers": [1.0, 0.25, 2.0, 3.0, 0.5]},
         "the MLP": {"mlp_multipliers": [0.5, 2.0]}, "embedding": {"embedding_multiplier": 3.0}, "head": {"lm_head_multiplier": 2.0}},
    ),
    "falcon_h1, norms": Variant(
        "falcon_h1", {**MIXED, "mamba_d_ssm": 128, "mamba_rms_norm": True}, {"order": {"mamba_norm_before_gate": False}}
    ),
}  # fmt: skip
"""Falcon-H1, which is converted between Hugging Face's files, and trained."""
FALCON: dict[str, Any] = {"layer_norm_epsilon": 1e-3, **rope(5000.0)}
DBRX_ATTENTION = {"kv_n_heads": 4, "rope_theta": 5000.0}
DBRX_EXPERTS = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
MODERNBERT: dict[str, Any] = {"norm_eps": 1e-3, "local_attention": 2 * WINDOW}
MODERNBERTS = {
    "modernbert_decoder": Variant(
        "modernbert-decoder", {**MODERNBERT, **two_ropes(rope_of(5000.0), rope_of(700.0))},
        {"epsilon": {"norm_eps": 1e-5}, "one less": {"local_attention": 2 * WINDOW - 2, "sliding_window": WINDOW - 1},
         "windows elsewhere": windows(LAYERS - 1), "one base": two_ropes(rope_of(5000.0), rope_of(5000.0)),
         "other base": two_ropes(rope_of(700.0), rope_of(700.0)), "activation": {"hidden_activation": "gelu_pytorch_tanh"},
         "before the head": {"classifier_activation": "gelu_pytorch_tanh"}},
    ),
    "modernbert_decoder, biases": Variant(
        "modernbert-decoder",
        {**MODERNBERT, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "tie_word_embeddings": False,
         **windows(LAYERS // 2), **two_ropes(rope_of(5000.0), rope_of(700.0))},
    ),
    "modernbert_decoder, no biases": Variant(
        "modernbert-decoder", {**MODERNBERT, "decoder_bias": False, **two_ropes(rope_of(700.0), rope_of(700.0))},
    ),
}  # fmt: skip
BEYOND_MEGATRON = {
    **GEMMAS_4,
    **LFMS_3,
    **OWN_SIZES,
    **APERTUS,
    **KIMIS,
    **FALCONS_H1,
    **MODERNBERTS,
    "granite": Variant(
        "granite", {name: value for name, value in GRANITE.items() if name != "shared_intermediate_size"},
        {"embedding": {"embedding_multiplier": 11.0}, "logits": {"logits_scaling": 4.0}, "residual": {"residual_multiplier": 0.5},
         "scores": {"attention_multiplier": 0.2}},
    ),
    "hyperclovax": Variant(
        "hyperclovax",
        {"head_dim": 12, **{name: value for name, value in GRANITE.items() if name != "shared_intermediate_size"}},
        {"embedding": {"embedding_multiplier": 11.0}, "logits": {"logits_scaling": 4.0}, "residual": {"residual_multiplier": 0.5},
         "scores": {"attention_multiplier": 0.2}, "usual scores": {"attention_multiplier": None}},
    ),
    "hyperclovax, no norms after sublayers": Variant(
        "hyperclovax", {"use_post_norm": False, "attention_bias": True, "mlp_bias": True}, {"logits": {"logits_scaling": 4.0}}
    ),
    "gpt_neox, parallel": Variant(
        "gpt_neox", {"num_key_value_heads": 8, "layer_norm_eps": 1e-3, "hidden_act": "gelu_new", "attention_bias": False},
        {"one after the other": {"use_parallel_residual": False}, "activation": {"hidden_act": "gelu"}},
    ),
    "phi": Variant(
        "phi",
        {"layer_norm_eps": 1e-3, **rope(5000.0, partial_rotary_factor=0.5)},
        {"epsilon": {"layer_norm_eps": 1e-5}, "whole heads": rope(5000.0, partial_rotary_factor=1.0), "activation": {"hidden_act": "gelu"}},
    ),
    "phi, norms of q and k": Variant("phi", {"layer_norm_eps": 1e-3, "qk_layernorm": True, "tie_word_embeddings": True}),
    "falcon": Variant(
        "falcon", {**FALCON, "ffn_hidden_size": 80},
        {"one after the other": {"parallel_attn": False}, "activation": {"activation": "gelu_new"}}
    ),
    "falcon, two norms": Variant("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4, "bias": True}),
    "falcon, one norm and groups of heads": Variant(
        "falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                   "tie_word_embeddings": False}
    ),
    "falcon, one after the other": Variant("falcon", {**FALCON, "parallel_attn": False, "multi_query": False}),
    "cohere": Variant(
        "cohere", {"layer_norm_eps": 1e-3, "logit_scale": 0.3},
        {"epsilon": {"layer_norm_eps": 1e-5}, "logits": {"logit_scale": 0.4}, "rotary base": rope(10000.0)},
    ),
    "cohere, norms of q and k": Variant("cohere", {"layer_norm_eps": 1e-3, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": Variant(
        "cohere2", {"layer_norm_eps": 1e-3, "sliding_window": WINDOW},
        {"one less": {"sliding_window": WINDOW - 1}, "windows elsewhere": windows(LAYERS - 1)},
    ),
    "cohere2, heads of their own size": Variant(
        "cohere2", {"layer_norm_eps": 1e-3, "sliding_window": WINDOW, "head_dim": 12, "attention_bias": True},
    ),
    "cohere_compass_text": Variant(
        "cohere_compass_text",
        {"layer_norm_eps": 1e-3, "sliding_window": WINDOW, "head_dim": 12, "logit_scale": 0.5, **windows(2),
         **two_ropes(None, rope_of(700.0))},
        {"one less": {"sliding_window": WINDOW - 1}, "logits": {"logit_scale": None},
         "rope everywhere": two_ropes(rope_of(700.0), rope_of(700.0)),
         "two bases": two_ropes(rope_of(5000.0), rope_of(700.0)), "no rope": two_ropes(None, None),
         "scaled": two_ropes(None, rope_of(700.0, rope_type="linear", factor=4.0)),
         "windows elsewhere": windows(LAYERS - 1), "windows in all layers": windows(0)},
    ),
    "gptj": Variant(
        "gptj", {**GPT2_SIZES, "rotary_dim": 4}, {"rotation": {"rotary_dim": 8}, "activation": {"activation_function": "gelu"}}
    ),
    "codegen": Variant("codegen", {**GPT2_SIZES, "rotary_dim": 4}, {"rotation": {"rotary_dim": 8}}),
    "olmo": Variant("olmo", {}, {"limits": {"clip_qkv": 0.5}}),
    "olmo, limits": Variant("olmo", {"clip_qkv": 0.7}, {"another": {"clip_qkv": 0.5}}),
    "nanochat": Variant("nanochat", {"final_logit_softcapping": 2.5}, {"uncapped logits": {"final_logit_softcapping": None}}),
    "flex_olmo": Variant(
        "flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}, {"weights made to sum up to 1": {"norm_topk_prob": True}}
    ),
    "hunyuan_v1_dense": Variant("hunyuan_v1_dense", {"head_dim": 12}, {"epsilon": {"rms_norm_eps": 1e-5}}),
    "hunyuan_v1_dense, stretched": Variant(
        "hunyuan_v1_dense", {"head_dim": 12, **rope(5000.0, rope_type="dynamic", alpha=10.0, factor=1.0)}, {"not stretched": rope(5000.0)}
    ),
    "hunyuan_v1_moe": Variant("hunyuan_v1_moe", {"head_dim": 12, "num_experts": 4, "moe_topk": 2}, {"one expert": {"moe_topk": 1}}),
    "granite_swa": Variant(
        "granite_swa",
        {**{name: value for name, value in GRANITE.items() if name != "shared_intermediate_size"}, "sliding_window": WINDOW,
         "layer_rope_theta": [5000.0, 0, 5000.0, 5000.0]},
        {"one less": {"sliding_window": WINDOW - 1}, "all layers rotate": {"layer_rope_theta": [5000.0] * 4}},
    ),
    "granite_moe": Variant(
        "granitemoe",
        {**{name: value for name, value in GRANITE.items() if name != "shared_intermediate_size"}, "num_local_experts": 4},
        {"one expert": {"num_experts_per_tok": 1}, "residual": {"residual_multiplier": 0.5}},
    ),
    "granite_moe_shared": Variant("granitemoeshared", {**GRANITE, "num_local_experts": 4}, {"one expert": {"num_experts_per_tok": 1}}),
    "granite_moe_swa": Variant(
        "granitemoe_swa", {**GRANITE, "num_local_experts": 4, "sliding_window": WINDOW},
        {"one less": {"sliding_window": WINDOW - 1}, "a layer without rope": {"layer_rope_theta": [5000.0, 0, 5000.0, 5000.0]}},
    ),
    "bloom": Variant("bloom", {"n_layer": LAYERS, "n_head": 8, "layer_norm_epsilon": 1e-3}, {"epsilon": {"layer_norm_epsilon": 1e-5}}),
    "bloom, heads that are no power of two": Variant(
        "bloom", {"n_layer": LAYERS, "n_head": 12, "hidden_size": 48, "layer_norm_epsilon": 1e-3}
    ),
    "mpt": Variant(
        "mpt", {"d_model": 64, "n_layers": LAYERS, "n_heads": 8, "layer_norm_epsilon": 1e-3, "attn_config": {"softmax_scale": 0.2}},
        {"limits": {"attn_config": {"softmax_scale": 0.2, "clip_qkv": 0.5}}},
    ),
    "mpt, limits": Variant(
        "mpt", {"d_model": 48, "n_layers": LAYERS, "n_heads": 12, "layer_norm_epsilon": 1e-3, "attn_config": {"clip_qkv": 0.5}}
    ),
    "dbrx": Variant(
        "dbrx",
        {"d_model": 64, "n_layers": LAYERS, "n_heads": 8, "max_seq_len": 96, "attn_config": {**DBRX_ATTENTION, "clip_qkv": 0.7},
         "ffn_config": DBRX_EXPERTS},
        {"no limit": {"attn_config": DBRX_ATTENTION},
         "weights left as they are": {"ffn_config": {**DBRX_EXPERTS, "moe_normalize_expert_weights": None}},
         "base": {"attn_config": {**DBRX_ATTENTION, "rope_theta": 700.0}, **rope(700.0)}},
    ),
    "openai_gpt": Variant(
        "openai-gpt", {**GPT2_SIZES, "n_ctx": 96}, {"epsilon": {"layer_norm_epsilon": 1e-5}, "activation": {"afn": "silu"}}
    ),
    "openai_gpt, relu": Variant("openai-gpt", {**GPT2_SIZES, "afn": "relu", "tie_word_embeddings": False}),
    "opt": Variant("opt", {"ffn_dim": 80, "word_embed_proj_dim": 64}, {"activation": {"activation_function": "gelu"}}),
    "opt, without biases": Variant("opt", {"ffn_dim": 80, "enable_bias": False, "word_embed_proj_dim": 64, "tie_word_embeddings": False}),
    "biogpt": Variant("biogpt", {}, {"unscaled": {"scale_embedding": False}, "activation": {"hidden_act": "gelu_new"}}),
    "gpt_neo": Variant(
        "gpt_neo",
        {"num_layers": LAYERS, "num_heads": 8, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW,
         "layer_norm_epsilon": 1e-3},
        {"one less": {"window_size": WINDOW - 1}, "activation": {"activation_function": "gelu"}},
    ),
    "gpt_bigcode, as many kv heads as heads": Variant("gpt_bigcode", {**GPT2_SIZES, "multi_query": False, "tie_word_embeddings": False}),
    "persimmon": Variant(
        "persimmon", {"layer_norm_eps": 1e-3}, {"epsilon": {"layer_norm_eps": 1e-5}, "whole heads": rope(5000.0, partial_rotary_factor=1.0)}
    ),
    "persimmon, no norms of q and k": Variant("persimmon", {"layer_norm_eps": 1e-3, "qk_layernorm": False}),
    "minicpm3": Variant(
        "minicpm3", {**LATENT_ALONE, "pad_token_id": None, "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 16},
        {"embedding": {"scale_emb": 2}, "residual": {"scale_depth": 1.1}, "logits": {"dim_model_base": 32}},
    ),
    "xglm": Variant(
        "xglm", {"d_model": 64, "num_layers": LAYERS, "attention_heads": 8, "ffn_dim": 80, "pad_token_id": 1},
        {"unscaled": {"scale_embedding": False}, "activation": {"activation_function": "gelu_new"}},
    ),
    "ctrl": Variant("ctrl", {"n_embd": 64, "n_layer": LAYERS, "n_head": 8, "dff": 80, "layer_norm_epsilon": 1e-6}),
    "cohere2_moe": Variant(
        "cohere2_moe",
        {"layer_norm_eps": 1e-3, "num_experts": 4, "head_dim": 12, "sliding_window": WINDOW, "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 56, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
        {"one expert": {"num_experts_per_tok": 1}, "scores": {"expert_selection_fn": "sigmoid"}},
    ),
    "cohere2_moe, sigmoid": Variant(
        "cohere2_moe", {"rms_norm_eps": 1e-3, "num_experts": 4, "head_dim": 12, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "gpt_neox_japanese": Variant(
        "gpt_neox_japanese", {"layer_norm_eps": 1e-3, "num_key_value_heads": 8, **rope(5000.0, partial_rotary_factor=0.5)},
        {"epsilon": {"layer_norm_eps": 1e-5}},
    ),
    "afmoe": Variant(
        "afmoe",
        {**EXPERTS, "num_experts": 4, "num_shared_experts": 2, "num_dense_layers": 1, "head_dim": 12, "mup_enabled": True,
         "route_scale": 1.7, "sliding_window": WINDOW, **every_other_window()},
        {"one less": {"sliding_window": WINDOW - 1}, "unscaled embedding": {"mup_enabled": False}, "scale": {"route_scale": 1.0},
         "more dense layers": {"num_dense_layers": 2}},
    ),
    "beam": Variant(
        "beam",
        {**EXPERTS, "num_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "head_dim": 12, "sliding_window": WINDOW,
         "mlp_layer_types": ["dense", "sparse"] * 2, "final_logit_softcapping": 1.5, **every_other_window(),
         **two_ropes(None, rope_of(700.0))},
        {"one less": {"sliding_window": WINDOW - 1}, "one group": {"n_group": 1, "topk_group": 1}, "scale": {"routed_scaling_factor": 1.0},
         "weights left as they are": {"norm_topk_prob": False}, "no limit": {"final_logit_softcapping": None},
         "rope everywhere": two_ropes(rope_of(700.0), rope_of(700.0)), "no rope": two_ropes(None, None),
         "windows elsewhere": windows(LAYERS - 1)},
    ),
    "diffllama": Variant(
        "diffllama", {"head_dim": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "attention_bias": True},
        {"epsilon": {"rms_norm_eps": 1e-5}, "fewer key/value heads": {"num_key_value_heads": 2}, "activation": {"hidden_act": "gelu"}},
    ),
    "kolibri1": Variant(
        "kolibri1",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 12, "sliding_window": WINDOW,
         **every_other_window()},
        {"one less": {"sliding_window": WINDOW - 1}, "weights made to sum up to 1": {"norm_topk_prob": True}},
    ),
    "mistral4, long": Variant(
        "mistral4", {**MISTRAL4, **rope(5000.0, **YARN, llama_4_scaling_beta=0.3)},
        {"no temperature": rope(5000.0, **YARN, llama_4_scaling_beta=0.0), "weights left as they are": {"norm_topk_prob": False},
         "more dense layers": {"first_k_dense_replace": 2}},
    ),
    "bitnet": Variant("bitnet", {}, {"epsilon": {"rms_norm_eps": 1e-5}}),
    "axk1": Variant("axk1", {**LATENT, "mlp_layer_types": ["dense", "sparse"] * 2}, {"one group": {"n_group": 1, "topk_group": 1}}),
    "bamba, epsilon": Variant(
        "bamba", {**MIXED, "attn_layer_indices": [1]}, {"epsilon": {"rms_norm_eps": 1e-2}}
    ),
    "granite_moe_hybrid": Variant(
        "granitemoehybrid", {**MIXED, **MIXED_LAYERS, **GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
        {"no positions": {"position_embedding_type": None}, "residual": {"residual_multiplier": 0.5}},
    ),
    "granite_moe_hybrid, experts": Variant(
        "granitemoehybrid",
        {**MIXED, **MIXED_LAYERS, **GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
        {"one expert": {"num_experts_per_tok": 1}, "rope": {"position_embedding_type": "rope"}},
    ),
    "lfm2": Variant(
        "lfm2", {**LFM2, "intermediate_size": 99, "block_multiple_of": 8},
        {"epsilon": {"norm_eps": 1e-2}},
    ),
    "olmo_hybrid": Variant(
        "olmo_hybrid", {**OLMO_HYBRID, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 3},
        {"no positions": rope_of_none(), "small writes": {"linear_allow_neg_eigval": False}},
    ),
    "lfm2_moe": Variant(
        "lfm2_moe", {**LFM2, **EXPERTS, "num_experts": 4, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
        {"weights left as they are": {"norm_topk_prob": False}, "no bias": {"use_expert_bias": False}},
    ),
    "ministral3, long": Variant(
        "ministral3", {"head_dim": 12, **rope(5000.0, **YARN, llama_4_scaling_beta=0.3) },
        {"no temperature": rope(5000.0, **YARN)},
    ),
    "llama4, short chunks": Variant(
        "llama4_text", LLAMA4_LONG,
        {"longer chunks": {"attention_chunk_size": WINDOW + 1}, "no temperature": {"attn_temperature_tuning": False},
         "scale": {"attn_scale": 0.2}, "floor": {"floor_scale": 4}},
    ),
}  # fmt: skip
"""Models that Megatron has no arguments for: they are converted between Hugging Face's files, and trained."""
DEEPSEEK_V4: dict[str, Any] = {
    "num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 16, "q_lora_rank": 24, "o_groups": 4, "o_lora_rank": 12,
    "sliding_window": WINDOW,
    "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"], "n_routed_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.2,
    "index_n_heads": 2, "index_head_dim": 12, "index_topk": 3, "hc_mult": 3, "hc_sinkhorn_iters": 3,
    **entry_ropes(**PLAIN_YARN),
}  # fmt: skip
QWEN_4: dict[str, Any] = {
    **{name: size for name, size in DELTA_NET.items() if name != "layer_types"}, **rope(5000.0, partial_rotary_factor=0.5),
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2,
    "hc_count": 3, "hc_lowrank": 10, "output_gate_type": "sigmoid",
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2,
    "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 5,
    "make_ngram_vocab_size_divisible_by": 8, "ple_conv_kernel_size": 3,
}  # fmt: skip
UNTRAINED = {
    "molmo2_text": Variant(
        "molmo2_text", {**MOLMO, "num_key_value_heads": 2}, {"scaled layers": {"rope_scaling_layers": [1, 3]}, **NORMS_OF_MOLMO}, QUICK,
        QUICK,
    ),
    "molmo2_text, norms after sublayers": Variant(
        "molmo2_text", {**MOLMO, "norm_after": True, "qk_norm_type": "olmo", "attention_bias": True}, {"epsilon": {"rms_norm_eps": 1e-5}},
        FEW, ALL_SLOW,
    ),
}  # fmt: skip
"""Models that Megatron core computes, and that the trainer doesn't train."""
MAMBA_1: dict[str, Any] = {
    "intermediate_size": 96, "state_size": 5, "conv_kernel": 3, "time_step_rank": 6, "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}  # fmt: skip
ZAMBA: dict[str, Any] = {
    "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 6, "n_mamba_heads": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip
INKLING: dict[str, Any] = {
    "head_dim": 12, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 10, "d_rel": 5, "rel_extent": 9,
    "sliding_window_size": WINDOW, "conv_kernel_size": 3, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 3, "route_scale": 2.0, "unpadded_vocab_size": 125, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "log_scaling_n_floor": 6, "rope_parameters": None,
    "eos_token_id": 4,
}  # fmt: skip
DORY: dict[str, Any] = {
    "head_dim": 12, "num_hidden_layers": 5, "n_input_layers": 1, "n_output_layers": 2, "n_recurrent_loops": 3, "sliding_window": WINDOW,
    "initializer_range": 0.5, "ngpt_alpha_init": 0.3, **two_ropes(rope_of(5000.0), rope_of(700.0)),
}  # fmt: skip
ZAYA: dict[str, Any] = {
    "head_dim": 12, "num_experts": 4, "moe_intermediate_size": 24, "router_hidden_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
ZAMBA2: dict[str, Any] = {
    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "num_mem_blocks": 2, "adapter_rank": 6, "mamba_d_state": 5,
    "mamba_ngroups": 2, "n_mamba_heads": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "num_layers": LAYERS // 2, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "ffn_hidden_size": 88,
    "intermediate_size": 88, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4,
    "v_head_dim": 6, "moe_topk": 3, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 24, "routed_scaling_factor": 2.5,
}  # fmt: skip
CONVERTED = {
    **GEMMAS_4,
    **OWN_SIZES,
    **APERTUS,
    **KIMIS,
    **FALCONS_H1,
    **MODERNBERTS,
    "glm_moe_dsa, shared indexers": Variant(
        "glm_moe_dsa",
        {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full", "shared"]},
        {"all positions": {"index_topk": 64}, "epsilon": {"rms_norm_eps": 1e-5}},
    ),
    **{
        kind: Variant(
            kind, {**MAMBA_1, "use_bias": True},
            {"epsilon": {"layer_norm_epsilon": 1e-5}, **others},
        )
        for kind, others in (("mamba", {}), ("falcon_mamba", {"epsilon of the mixer": {"mixer_rms_eps": 1e-2}}))
    },
    "mamba, tied": Variant("mamba", {**MAMBA_1, "use_conv_bias": False, "tie_word_embeddings": True}),
    "recurrent_gemma": Variant(
        "recurrent_gemma",
        {"lru_width": 40, "conv1d_width": 3, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"],
         "num_key_value_heads": 2, "logits_soft_cap": 1.5, **rope(5000.0, partial_rotary_factor=0.5)},
        {"epsilon": {"rms_norm_eps": 1e-5}, "base": rope(700.0, partial_rotary_factor=0.5),
         "whole heads rotate": rope(5000.0, partial_rotary_factor=1.0), "activation": {"hidden_activation": "silu"},
         "one less": {"attention_window_size": WINDOW - 1}, "limit": {"logits_soft_cap": 2.0}},
    ),
    "doge": Variant(
        "doge",
        {"keep_window_size": 9, "attention_bias": True, "mlp_bias": True},
        {"epsilon": {"rms_norm_eps": 1e-5}, "base": rope(700.0), "one key less": {"keep_window_size": 8}, "window": {"sliding_window": 6}},
    ),
    "doge, with windows": Variant(
        "doge", {"sliding_window": WINDOW, "head_dim": 6, "tie_word_embeddings": True}, {"one less": {"sliding_window": WINDOW - 1}},
    ),
    "inkling_text": Variant(
        "inkling_text",
        INKLING,
        {"epsilon": {"rms_norm_eps": 1e-5}, "one less": {"unpadded_vocab_size": 124}, "scale": {"route_scale": 1.0},
         "later growth": {"log_scaling_n_floor": 9}, "less growth": {"log_scaling_alpha": 0.01}, "no growth": {"log_scaling_n_floor": None},
         "one expert": {"num_experts_per_tok": 1}, "divisor": {"logits_mup_width_multiplier": 1.0}},
    ),
    "inkling_text, without windows": Variant(
        "inkling_text",
        {**INKLING, "layer_types": ["hybrid"] * 4, "unpadded_vocab_size": None, "log_scaling_n_floor": None, "n_shared_experts": 1,
         "mlp_layer_types": ["sparse"] * 4},
    ),
    "dory": Variant(
        "dory", DORY,
        {"fewer runs": {"n_recurrent_loops": 2}, "one less": {"sliding_window": WINDOW - 1}, "unit": {"initializer_range": 0.4},
         "base": two_ropes(rope_of(900.0), rope_of(700.0)), "base of windows": two_ropes(rope_of(5000.0), rope_of(90.0)),
         "rate": {"ngpt_alpha_init": 0.2}},
    ),
    "dory, tied": Variant(
        "dory",
        {**DORY, "tie_word_embeddings": True, "n_input_layers": 0, "num_hidden_layers": 4, "num_key_value_heads": 8,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "zaya": Variant(
        "zaya",
        {**ZAYA, "cca_time0": 3, "cca_time1": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": WINDOW,
         "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"], **ropes_of_zaya()},
        {"epsilon": {"rms_norm_eps": 1e-5}, "base": ropes_of_zaya(full=900.0), "base of windows": ropes_of_zaya(windowed=90.0),
         "share of windows": ropes_of_zaya(share=1.0), "yarn": ropes_of_zaya(**OLMO_YARN), "one less": {"sliding_window": WINDOW - 1}},
    ),
    "zaya, without windows": Variant(
        "zaya", {**ZAYA, "tie_word_embeddings": True, "sliding_window": WINDOW, **ropes_of_zaya()}, {"base": ropes_of_zaya(full=900.0)},
    ),
    "zamba": Variant(
        "zamba",
        {**ZAMBA, "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "mamba_proj_bias": True},
        {"epsilon": {"rms_norm_eps": 1e-5}, "activation": {"hidden_act": "gelu_pytorch_tanh"}},
    ),
    "zamba, by a pattern": Variant(
        "zamba",
        {**ZAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 8, "mamba_conv_bias": False,
         "mamba_expand": 1, "attention_head_dim": 6},
    ),
    "zamba2": Variant(
        "zamba2", {**ZAMBA2, "num_key_value_heads": 8, "use_shared_attention_adapter": True, "use_mem_rope": True},
        {"epsilon": {"rms_norm_eps": 1e-5}, "base": rope(700.0), "no rope": {"use_mem_rope": False},
         "activation": {"hidden_act": "gelu_pytorch_tanh"}},
    ),
    "zamba2, without adapters of attention": Variant(
        "zamba2", {**ZAMBA2, "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"]},
    ),
    "jamba": Variant(
        "jamba",
        {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 6, "num_experts": 4,
         "num_experts_per_tok": 2},
        {"epsilon": {"rms_norm_eps": 1e-5}, "one expert": {"num_experts_per_tok": 1}},
    ),
    "jamba, dense": Variant(
        "jamba",
        {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3, "attn_layer_period": 2,
         "attn_layer_offset": 0},
    ),
    "hrm_text": Variant(
        "hrm_text", {"head_dim": 12, "H_cycles": 2, "L_cycles": 2, "embedding_scale": 3.0},
        {"more runs": {"H_cycles": 3, "num_hidden_layers": 9 * LAYERS}, "fewer runs": {"L_cycles": 1, "num_hidden_layers": 4 * LAYERS},
         "epsilon": {"rms_norm_eps": 1e-5}, "base": rope(700.0), "scale": {"embedding_scale": 2.0}},
    ),
    "minimax": Variant(
        "minimax",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
        {"epsilon": {"rms_norm_eps": 1e-5}, "one expert": {"num_experts_per_tok": 1}, "base": rope(700.0),
         "window": {"sliding_window": WINDOW},
         **{key: {key: 1.5} for kind in ("full_attn", "linear_attn", "mlp") for key in (f"{kind}_alpha_factor", f"{kind}_beta_factor")}},
    ),
    "jetmoe": Variant(
        "jetmoe",
        {"num_attention_heads": 8, "head_dim": 12, "kv_channels": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"base": rope(700.0), "epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "jetmoe, tied": Variant(
        "jetmoe",
        {"num_attention_heads": 12, "head_dim": 8, "kv_channels": 8, "num_local_experts": 6, "num_experts_per_tok": 3,
         "tie_word_embeddings": True},
    ),
    "longcat_flash": Variant(
        "longcat_flash",
        {**LONGCAT, **rope(5000.0)},
        {"base": rope(700.0), "epsilon": {"rms_norm_eps": 1e-5}, "scale": {"routed_scaling_factor": 1.5}, "fewer experts": {"moe_topk": 2}},
    ),
    "longcat_flash, yarn": Variant("longcat_flash", {**LONGCAT, "zero_expert_num": 5, **rope(5000.0, **YARN)}),
    "phimoe": Variant(
        "phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": WINDOW},
        {"one less": {"sliding_window": WINDOW - 1}, "epsilon": {"rms_norm_eps": 1e-5}, "farther": {"router_jitter_noise": 0.6},
         "base": rope(700.0)},
    ),
    "phimoe, longrope": Variant(
        "phimoe",
        {"num_local_experts": 4,
         **rope(5000.0, rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1.0, 2.0, 3.0, 4.0], short_mscale=1.2,
                long_mscale=1.3, original_max_position_embeddings=16)},
        {"epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "axk2": Variant(
        "axk2",
        {**LATENT, **INDEXER, "gated_norm_rank": 3, "mlp_layer_types": ["dense", "sparse"] * 2, "rms_norm_eps": 1e-3},
        {"epsilon": {"rms_norm_eps": 1e-5}, "fewer positions": {"index_topk": 4}, "one group": {"n_group": 1, "topk_group": 1}},
    ),
    "nemotron_nas, a layer without parts": Variant(
        "nemotron-nas", {**DECI, "block_configs": [*BLOCKS[:3], {"attention": _NO_ATTENTION, "ffn": _NO_MLP}]}
    ),
    "bailing_hybrid": Variant(
        "bailing_hybrid",
        {**{name: size for name, size in KIMI.items() if not name.startswith("linear_")}, "head_dim": 6, "short_conv_kernel_size": 3},
        {"another bound": {"kda_lower_bound": -3.0}, "no bound": {"kda_safe_gate": False}, "all groups": {"topk_group": 2}},
    ),
    **LFMS_3,
    "qwen4_exp_text": Variant(
        "qwen4_exp_text", QWEN_4,
        {"one block": {"indexer_budget": 2}, "larger blocks": {"indexer_compress_ratio": 4},
         "another gate": {"output_gate_type": "silu"}, "weights left as they are": {"norm_topk_prob": False},
         "one expert": {"num_experts_per_tok": 1}, "whole heads": rope(5000.0), "epsilon": {"rms_norm_eps": 1e-5}},
    ),
    "qwen4_exp_text, tied": Variant(
        "qwen4_exp_text",
        {**QWEN_4, "tie_word_embeddings": True, "ple_layer_ids": None, "hc_count": 2, "output_gate_type": None,
         "layer_types": ["linear_attention", "indexed_attention"] * 2},
        {"another gate": {"output_gate_type": "sigmoid"}},
    ),
    "minimax_m3_vl_text": Variant(
        "minimax_m3_vl_text",
        {"head_dim": 16, "intermediate_size": 24, "dense_intermediate_size": 88, "shared_intermediate_size": 40, "num_local_experts": 4,
         "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "swiglu_limit": 0.5,
         "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 4, "index_head_dim": 16, "index_block_size": 4,
         "index_topk_blocks": 2, **rope(5000.0, partial_rotary_factor=0.5)},
        {"limit": {"swiglu_limit": 1.0}, "one block": {"index_topk_blocks": 1}, "larger blocks": {"index_block_size": 5},
         "local blocks": {"index_local_blocks": 2}, "scale": {"routed_scaling_factor": 1.0},
         "no indexer": {"layer_types": ["full_attention"] * 4}, "whole heads": rope(5000.0)},
    ),
    "molmo2_text, some layers scaled": Variant(
        "molmo2_text", {**MOLMO, "rope_scaling_layers": [1, 3], "qk_norm_type": "olmo", "norm_after": True},
        {"other layers": {"rope_scaling_layers": [0, 3]}, "all layers": {"rope_scaling_layers": [0, 1, 2, 3]},
         "norms before": {"norm_after": False}},
    ),
    "deepseek_v4": Variant(
        "deepseek_v4", DEEPSEEK_V4, {"one entry": {"index_topk": 1}, "yarn's usual factor": entry_ropes(**OLMO_YARN)},
    ),
    "deepseek_v4, all settings": Variant(
        "deepseek_v4", DEEPSEEK_V4,
        {"one less": {"sliding_window": WINDOW - 1}, "scale": {"routed_scaling_factor": 1.0}, "limit": {"swiglu_limit": 0.5},
         "one step": {"hc_sinkhorn_iters": 1}, "epsilon of streams": {"hc_eps": 0.1}, "score": {"scoring_func": "sigmoid"},
         "epsilon": {"rms_norm_eps": 1e-5}, "base": entry_ropes(theta=900.0, **PLAIN_YARN), "no scaling": entry_ropes(),
         "base of entries": entry_ropes(entry_theta=900.0, **PLAIN_YARN), "narrower rope": entry_ropes(share=0.25, **PLAIN_YARN),
         "attention's factor": entry_ropes(**OLMO_YARN, attention_factor=1.5)},
    ),
    "hy_v4": Variant(
        "hy_v4",
        {**LATENT, **INDEXER, "index_topk": 5, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "rms_norm_eps": 1e-3,
         "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 3, "swiglu_limit": 0.2, **rope(5000.0, **PLAIN_YARN)},
        {"epsilon": {"rms_norm_eps": 1e-5}, "fewer positions": {"index_topk": 2}, "limit": {"swiglu_limit": 0.5},
         "magnitude": {"hc_magnitude": 1.0}, "epsilon of streams": {"hc_eps": 0.1}, "scale": {"routed_scaling_factor": 1.0},
         "weights left as they are": {"norm_topk_prob": False}, "one expert": {"num_experts_per_tok": 1},
         "base": rope(700.0, **PLAIN_YARN), "no scaling": rope(5000.0), "yarn's usual factor": rope(5000.0, **OLMO_YARN)},
    ),
    "gemma3n_text": Variant(
        "gemma3n_text",
        {"head_dim": 12, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_parameters": None, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
         "intermediate_size": [88, 88, 64, 88], "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0], "laurel_rank": 5},
        {"one less": {"sliding_window": WINDOW - 1}, "capped logits": {"final_logit_softcapping": 2.0},
         "sparsity": {"activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0]}, "active stream": {"altup_active_idx": 1},
         "unscaled stream": {"altup_correct_scale": False}},
    ),
}  # fmt: skip
"""Models that are converted between Hugging Face's files. Those that are listed by name first are trained too."""
RELATIVES = {
    "bailing_moe2": Variant(
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 1,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5},
    ),
    "mimo": Variant("qwen2"),
    "internlm2": Variant("llama"),
    "qwen": Variant("qwen2", {"num_key_value_heads": 8}),
}  # fmt: skip
"""Family that transformers has no class for -> a model of another family that computes the same function."""


def family_of(variant: Variant) -> str:
    """The name of its family."""
    return next(
        name
        for name, family in families().items()
        if family.model_type == variant.model_type and family.describes({})
    )


def create(variant: Variant, directory: Path, auto: Any = None, **settings: Any) -> None:
    """Save a model of this kind; the same one every time.

    auto: a class such as AutoModelForSequenceClassification; None for a language model. settings: further ones.
    """
    import torch

    torch.manual_seed(20)
    sizes = (
        {**GPT2_SIZES}
        if "n_embd" in variant.settings or variant.model_type == "gpt2"
        else {**SIZES, "pad_token_id": 6, **rope(5000.0)}
    )
    if any(name in variant.settings for name in OTHER_EPSILONS):
        sizes.pop("rms_norm_eps", None)
    if variant.model_type in ("mamba2", "nemotron_h"):
        # These classes have their own key for epsilon, and no positions.
        del sizes["rms_norm_eps"], sizes["rope_parameters"]
    config = make_config(variant.model_type, **{**sizes, **variant.settings, **settings})
    found = auto or model_class(config)
    is_class = config.model_type == "mistral4" and auto is None
    model = found(config) if is_class else found.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases")):
                buffer.normal_(0.0, 0.2)
            if name.endswith("balancing_biases"):
                buffer[-1] = -1.0  # transformers sets it when it loads a model
            if name.endswith("tid2eid"):
                buffer.random_(0, config.n_routed_experts)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
            if name.endswith("act_fn.beta"):
                buffer.normal_(0.5, 0.2)
            if name.endswith("act_fn.eps"):
                buffer.normal_(-0.3, 0.1)
    # transformers makes the numbers of xIELU in bfloat16, whatever the model's dtype.
    model.float().save_pretrained(directory)
    _name_own_class(family_of(variant), directory / "config.json")


def _name_own_class(name: str, config: Path) -> None:
    """Name the family's class, as published models do. transformers computes some of them by Llama's class, and saves its name."""
    raw = json.loads(config.read_text())
    ours = families()[name].architectures
    computed_by_another = ["LlamaForCausalLM"], ["Molmo2Language"]
    if raw["architectures"] in computed_by_another and name != "llama":
        config.write_text(json.dumps(raw | {"architectures": [ours[0]]}, indent=2))


def make_config(model_type: str, **settings: Any) -> Any:
    """A configuration of transformers. DeciLM's is the tests' own, since transformers has none."""
    from transformers import AutoConfig

    if model_type == "nemotron-nas":
        from tests.deci_language import DeciConfig

        return DeciConfig(**settings)
    return AutoConfig.for_model(model_type, **settings)


def read_saved_config(directory: Path, **settings: Any) -> Any:
    """The configuration of a saved model. settings: replace those of config.json."""
    from transformers import AutoConfig

    if json.loads((directory / "config.json").read_text())["model_type"] == "nemotron-nas":
        from tests.deci_language import DeciConfig

        return DeciConfig.from_pretrained(directory, **settings)
    return AutoConfig.from_pretrained(directory, **settings)


def model_class(config: "PretrainedConfig") -> Any:
    """The class of a model. transformers 5.23 has one for Mistral 4 that its AutoModelForCausalLM doesn't list, and none
    for the language models of Molmo 2 and Step 3.7, and for DeciLM."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mistral4 import Mistral4ForCausalLM

    if config.model_type == "molmo2_text":
        from tests.molmo2_language import Molmo2Language

        return Molmo2Language
    if config.model_type == "step3p5":
        from tests.step_language import StepLanguage

        return StepLanguage
    if config.model_type == "nemotron-nas":
        from tests.deci_language import DeciLMForCausalLM

        return DeciLMForCausalLM
    return Mistral4ForCausalLM if config.model_type == "mistral4" else AutoModelForCausalLM


def load(directory: Path, **settings: Any) -> "PreTrainedModel":
    """Load a model as a user does, in float32 with eager attention. settings: replace those of config.json."""
    import torch

    config = read_saved_config(directory, **settings)
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = model_class(config).from_pretrained(directory, config=config, **options).eval()
    # Weights in a mapped file have any address, and products round otherwise at some of them.
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return cast("PreTrainedModel", model)


def compute(model: "PreTrainedModel", tokens: "torch.Tensor") -> "torch.Tensor":
    """Logits [batch, sequence, vocabulary]."""
    import torch

    with torch.no_grad():
        return cast("torch.Tensor", model(input_ids=tokens).logits)


def assert_same_bits(
    found: "PreTrainedModel", expected: "PreTrainedModel", dtype: "torch.dtype"
) -> None:
    """Names and weights; negative zeros and NaNs count too."""
    import torch

    bits = torch.int32 if dtype == torch.float32 else torch.int16
    ours, theirs = found.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == dtype, name
        assert torch.equal(ours[name].view(bits), tensor.view(bits)), name


def assert_comes_back(source: Path, saver: str, tmp_path: Path) -> None:
    """What transformers loads after a conversion to `saver` and back is the same, also if it saves the model again."""
    import torch

    import megaconv

    megaconv.convert(source, tmp_path / "there", saver=saver)
    megaconv.convert(tmp_path / "there", tmp_path / "out", saver="hf")
    assert_same_bits(load(tmp_path / "out"), load(source), torch.float32)
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert megaconv.diff(tmp_path / "again", source).same


def meaning(config: "PretrainedConfig") -> dict[str, Any]:
    """A configuration without what only says where it lies and by which version it was written."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }


ARCHITECTURE = (
    *(
        "architectures",
        "model_type",
        "dtype",
        "hidden_act",
        "rms_norm_eps",
        *OTHER_EPSILONS,
        "rope_parameters",
        "no_rope_layers",
        "max_position_embeddings",
    ),
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *(
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "use_sliding_window",
        "sliding_window",
        "layer_types",
    ),
)


def architecture(config: "PretrainedConfig") -> dict[str, Any]:
    """The settings that decide a model's tensors and logits, with defaults filled in."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"head_dim": head_dim} | {name: getattr(config, name, None) for name in ARCHITECTURE}
