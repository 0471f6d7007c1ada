"""Configurations of every decoder: as config.json says them, and any that may be, for hypothesis."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from megaconv.families import families, family_of_hf
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed, from_fields, one_or_each, per_layer
from tests.strategies import (
    BEYOND_MEGATRON,
    OF_BART,
    OF_T5,
    Draw,
    has_linear_attention,
    has_mamba,
    with_linear_attention,
    with_mamba,
)

Raw = dict[str, Any]

WITHOUT_CONFIG = ("biencoder", "retro")
"""Families whose models have no config.json: the arguments in a Megatron checkpoint describe them."""
FAMILIES = sorted(
    name for name in families() if name not in (*WITHOUT_CONFIG, *BEYOND_MEGATRON, "bert", "t5")
)
"""Decoders that Megatron's arguments can describe as well; those with an encoder are in test_encoder_config.py."""
LLAMA_LIKE = [name for name in FAMILIES if name not in ("gpt2", "mamba2", "nemotron_h", "qwen")]
"""Families whose config.json has Llama's words."""
WITHOUT_CLASS = (
    *(
        "baichuan",
        "bailing_moe2",
        "internlm2",
        "kimi_k3",
        "mimo",
        "nemotron_nas",
        "qwen",
    ),
)
"""Families that no release of transformers has."""
IN_TRANSFORMERS = [name for name in LLAMA_LIKE if name not in WITHOUT_CLASS]
SCALED = [
    name
    for name in IN_TRANSFORMERS
    if name not in ("phi3", "gpt_oss", "olmo3", "gemma3_text", "mellum", "cwm", "ministral3")
]
"""Phi-3 knows one kind of rope scaling, of its own; GPT-OSS is scaled if it says nothing; the others have two ropes."""
LATENT_SIZES: Raw = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "num_key_value_heads": 8,
}
LATENT_KEYS: Raw = {
    **LATENT_SIZES,
    "n_routed_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
}
SHARED_KEYS: Raw = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLP_KINDS: Raw = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
LINEAR_KEYS: Raw = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
INDEXER_KEYS: Raw = {"index_n_heads": 3, "index_head_dim": 6, "index_topk": 5}
EXPERT_KEYS: dict[str, Raw] = {
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": {**LATENT_KEYS, "n_group": 3, "topk_group": 2},
    "deepseek_v32": {**LATENT_KEYS, **INDEXER_KEYS, **MLP_KINDS, "n_group": 3, "topk_group": 2},
    "glm_moe_dsa": {**LATENT_KEYS, **INDEXER_KEYS, **MLP_KINDS},
    "glm4_moe_lite": {**LATENT_KEYS, **MLP_KINDS, "head_dim": LATENT_KEYS["qk_rope_head_dim"]},
    "dots1": {**SHARED_KEYS, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": True},
    "bailing_moe2": {**SHARED_KEYS, "num_experts": 6, "num_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 1,
                       "topk_group": 1},
    "sarvam_mla": {**{key: value for key, value in LATENT_KEYS.items() if key not in ("q_lora_rank", "n_routed_experts",
                   "n_shared_experts")}, "num_experts": 6, "num_shared_experts": 2, "use_qk_norm": True},
    "sarvam_moe": {**SHARED_KEYS, "num_experts": 6, "num_shared_experts": 2, "first_k_dense_replace": 2},
    "solar_open": {**SHARED_KEYS, "n_routed_experts": 6, "n_shared_experts": 2, "partial_rotary_factor": 0.5},
    "hy_v3": {**SHARED_KEYS, **MLP_KINDS, "num_experts": 6, "num_shared_experts": 2},
    "exaone_moe": {**SHARED_KEYS, **MLP_KINDS, "num_experts": 6, "num_shared_experts": 2, "sliding_window": 16,
                   "layer_types": ["sliding_attention", "full_attention"] * 2},
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 6, "moe_num_shared_experts": 2},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 14], "moe_k": 2, "moe_num_experts": 6, "moe_num_shared_experts": 2,
                             **MLP_KINDS},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "llama4": {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 72, "moe_layers": [1, 3],
               "no_rope_layers": [1, 1, 0, 1]},
    "mellum": {**SHARED_KEYS, **MLP_KINDS, "num_local_experts": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 4},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 5.0, "sliding_window": 16},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **LINEAR_KEYS,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0, 2],
    },
    "qwen3_5_moe": {
        **LINEAR_KEYS,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0, 2],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
SHARES_ROTATE = {
    "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 7e3},
}
GEMMA_4: Raw = {
    "hidden_act": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 10,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 5e5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    },
}
MISTRAL_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.2,
}
MIXED: Raw = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 5}
MUSE_LAYERS = ["sliding_attention", "full_attention"] * 2
OWN_KEYS: dict[str, Raw] = {
    "helium": {"head_dim": 4},
    **{
        name: {"hidden_act": "gelu_pytorch_tanh"}
        for name in ("gemma", "gemma2", "gemma3_text", "vaultgemma")
    },
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "jais2": {"hidden_act": "relu2", "layer_norm_eps": 1e-5},
    "arcee": {"hidden_act": "relu2"},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5},
    "youtu": {**LATENT_SIZES, "head_dim": LATENT_SIZES["qk_rope_head_dim"]},
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "use_parallel_residual": False,
        "head_dim": 4,
        "num_key_value_heads": 8,
    },
    "stablelm": {
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "head_dim": 4,  # hidden_size / heads
    },
    "qwen": {"intermediate_size": 56, "seq_length": 64, "layer_norm_epsilon": 1e-5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "glm": {"partial_rotary_factor": 0.5},
    "bamba": {**MIXED, "attn_layer_indices": [1, 2]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default"},
        },
    },
    "deepseek_v4": {
        "intermediate_size": 24,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 10,
        "o_groups": 2,
        "o_lora_rank": 6,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rate_csa": 2,
        "compress_rate_hca": 8,
        **INDEXER_KEYS,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "num_hash_layers": 1,
        **SHARED_KEYS,
        "n_routed_experts": 6,
    },
    "falcon_h1": {**MIXED, "mamba_d_ssm": 64, "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.75]},
    "bailing_hybrid": {
        **{name: size for name, size in LATENT_SIZES.items() if name != "q_lora_rank"},
        "layer_group_size": 2,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 2,
        "moe_renormalize": True,
        "num_expert_group": 3,
        "topk_group": 2,
    },
    "kimi_k3": {
        **LATENT_SIZES,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 5,
            "short_conv_kernel_size": 3,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
        },
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_expert_hidden_size": 20,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 2,
    },
    "kimi_linear": {
        **LATENT_SIZES,
        "head_dim": LATENT_SIZES["qk_rope_head_dim"],
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 5,
            "short_conv_kernel_size": 3,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
        },
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 2,
        "moe_renormalize": True,
    },
    "olmo_hybrid": {**LINEAR_KEYS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {
        **SHARED_KEYS,
        "layer_types": ["conv", "full_attention"] * 2,
        "norm_eps": 1e-5,
        "num_experts": 6,
    },
    "granite_moe_hybrid": {
        **MIXED,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
        "residual_multiplier": 0.5,
    },
    **{
        name: {"multi_query": False, "hidden_act": "gelu", "scale_embedding": False}
        for name in ("biogpt", "gpt_bigcode")
    },
    **{name: {"hidden_act": "relu2"} for name in ("nanochat", "bitnet")},
    **{
        name: {"state_size": 5, "conv_kernel": 3, "time_step_rank": 6, "layer_norm_epsilon": 1e-5}
        for name in ("mamba", "falcon_mamba")
    },
    "hrm_text": {"num_layers_per_stack": None, "head_dim": 4},
    "minimax": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "modernbert_decoder": {
        "head_dim": 4,
        "norm_eps": 1e-5,
        "local_attention": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "decoder_bias": True,
    },
    "recurrent_gemma": {
        "head_dim": 4,
        "lru_width": 40,
        "conv1d_width": 3,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
        "logits_soft_cap": 20.0,
    },
    "doge": {"keep_window_size": 7, "is_moe": False},
    "inkling_text": {
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 5,
        "sliding_window": 16,
        "d_rel": 3,
        "rel_extent": 9,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        **SHARED_KEYS,
        **MLP_KINDS,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "log_scaling_n_floor": 20,
        "unpadded_vocab_size": 120,
    },
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "zaya": {
        "num_experts": 6,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 24,
        "router_hidden_size": 10,
        "cca_time0": 3,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 16,
        "rope_parameters": {
            "hybrid": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "rope_theta": 5e5,
            },
            "hybrid_sliding": {
                "rope_type": "default",
                "partial_rotary_factor": 1.0,
                "rope_theta": 7e3,
            },
        },
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 5,
        "num_mem_blocks": 2,
        "adapter_rank": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "jamba": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 6,
    },
    "muse_glimmer_text": {"hidden_activation": "silu", "layer_types": MUSE_LAYERS},
    "muse_spark_text": {
        **SHARED_KEYS,
        "num_local_experts": 6,
        "moe_hidden_size": 20,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "layer_types": MUSE_LAYERS,
    },
    "apertus": {"hidden_act": "xielu"},
    "apertus1p5_text": {"hidden_act": "xielu", "output_vocab_size": 96},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 3},
    "afmoe": {
        **SHARED_KEYS,
        "num_experts": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 2,
        "mup_enabled": True,
        "route_scale": 2.5,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "beam": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        },
    },
    "axk1": {**LATENT_KEYS, **MLP_KINDS, "n_group": 3, "topk_group": 2},
    "axk2": {
        **LATENT_KEYS,
        **INDEXER_KEYS,
        **MLP_KINDS,
        "n_group": 3,
        "topk_group": 2,
        "gated_norm_rank": 3,
    },
    "kolibri1": {
        **SHARED_KEYS,
        "num_local_experts": 6,
        "shared_expert_intermediate_size": 40,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral4": {**LATENT_KEYS, "head_dim": 10, "rope_scaling": MISTRAL_YARN},
    "cohere2_moe": {
        "layer_norm_eps": 1e-5,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "rms_norm_eps": None,
        "shared_expert_combination_strategy": "sum",
    },
    "lara_mini": {
        **SHARED_KEYS,
        **LINEAR_KEYS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
    "flint": {
        **SHARED_KEYS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0, 2],
    },
    "gpt_neox_japanese": {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.5},
    "jetmoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "kv_channels": 6},
    "longcat_flash": {
        **LATENT_SIZES,
        "head_dim": 4,
        "num_layers": 2,
        "ffn_hidden_size": 56,
        "intermediate_size": 56,
        "n_routed_experts": 6,
        "moe_topk": 4,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "routed_scaling_factor": 2.5,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 6.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "laguna": {
        **SHARED_KEYS,
        **MLP_KINDS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 2.5,
        "num_attention_heads_per_layer": [8, 4, 8, 4],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": SHARES_ROTATE,
    },
    "mimo_v2_flash": {
        **SHARED_KEYS,
        **MLP_KINDS,
        "n_routed_experts": 6,
        "v_head_dim": 5,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": SHARES_ROTATE,
    },
    "gemma4_text": {
        **GEMMA_4,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": 120,
    },
    "gemma4_unified_text": {**GEMMA_4, "use_double_wide_mlp": True},
    "glm5_next_text": {
        **{
            key: size
            for key, size in LATENT_KEYS.items()
            if key not in ("qk_rope_head_dim", "first_k_dense_replace")
        },
        **INDEXER_KEYS,
        **MLP_KINDS,
        "head_dim": 0,
        "index_kpool": 5,
        "hc_mult": 2,
        "swiglu_limit": 7.0,
        "linear_head_dim": 5,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3,
        "layer_types": [
            "indexed_attention",
            "indexed_attention",
            "linear_attention",
            "indexed_attention",
        ],
        "indexer_types": ["full", "shared", "full", "full"],
    },
    **{
        name: {
            **LATENT_KEYS,
            **INDEXER_KEYS,
            **MLP_KINDS,
            "head_dim": LATENT_SIZES["qk_rope_head_dim"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "hc_mult": 2,
            "swiglu_limit": 7.0,
        }
        for name in ("hy_v4", "hy_v4_vl_text")
    },
    "mistral_large4_text": {
        **{key: size for key, size in LATENT_KEYS.items() if key != "q_lora_rank"},
        **INDEXER_KEYS,
        **MLP_KINDS,
        "head_dim": LATENT_SIZES["qk_rope_head_dim"],
        "no_rope_layers": [1, 0, 0, 1],
        "kv_source_layers": [0, 1, 1, 0],
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_scaling": {"rope_type": "default"},
    },
    "qwen4_exp_text": {
        **LINEAR_KEYS,
        **SHARED_KEYS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "hc_count": 3,
        "hc_lowrank": 5,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 6,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 24,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
    },
    "molmo2_text": {"additional_vocab_size": 8, "rope_scaling_layers": [1, 3]},
    "baichuan": {"head_dim": 4, "num_key_value_heads": 8},
    "minimax_m3_vl_text": {
        "hidden_act": "swigluoai",
        "dense_intermediate_size": 72,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 2,
        **MLP_KINDS,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 4,
        "index_head_dim": 6,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "index_local_blocks": 2,
    },
    "step3p5": {
        **SHARED_KEYS,
        "n_routed_experts": 6,
        "share_expert_dim": 40,
        "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_sliding_attention_heads": 16,
        "swiglu_limits": [0.0, 7.0, 0.0, 0.0],
        "swiglu_limits_shared": [0.0, 16.0, 9.0, 0.0],
        "moe_router_scaling_factor": 3.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "rope_theta": 5e5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        },
    },
    "gemma3n_text": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [56, 56, 48, 56],
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": 120,
        "laurel_rank": 3,
    },
    "nemotron_nas": {
        "intermediate_size": None,
        "num_key_value_heads": None,
        "head_dim": 4,
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False},
                "ffn": {"ffn_mult": 12.0, "no_op": False},
            },
            {
                "attention": {"n_heads_in_group": None, "no_op": True},
                "ffn": {"ffn_mult": 24.0, "no_op": False},
            },
            {
                "attention": {"n_heads_in_group": 4, "no_op": False},
                "ffn": {"ffn_mult": None, "no_op": True},
            },
            {
                "attention": {"n_heads_in_group": 2, "no_op": False},
                "ffn": {"ffn_mult": 11.9, "no_op": False},
            },
        ],
    },
    "minicpm3": {
        **LATENT_SIZES,
        "head_dim": LATENT_SIZES["qk_rope_head_dim"],
        "scale_depth": 0.7,
        "dim_model_base": 16,
    },
    "xglm": {"ffn_dim": 56},
    "ctrl": {"dff": 56},
    "persimmon": {"hidden_act": "relu2", "layer_norm_eps": 1e-5},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "opt": {"ffn_dim": 56},
    **{
        name: {"num_local_experts": 6, "num_experts_per_tok": 3, "residual_multiplier": 0.5}
        for name in ("granite_moe", "granite_moe_shared", "granite_moe_swa")
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 3},
    "phi": {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "head_dim": 4,
        "partial_rotary_factor": 0.5,
    },
    "cohere": {"layer_norm_eps": 1e-5, "head_dim": 4},
    "cohere2": {"layer_norm_eps": 1e-5, "head_dim": 4},
    "cohere_compass_text": {
        "layer_norm_eps": 1e-5,
        "head_dim": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        },
    },
    **{name: {"rotary_dim": 2} for name in ("gptj", "codegen")},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 5},
    "nemotron_h": {
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 3,
        "n_groups": 2,
        "ssm_state_size": 5,
        "mlp_hidden_act": "relu2",
        "moe_latent_size": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
}
"""The keys that only these families have, or for which they have other values."""
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 99, "beta_fast": 8.0, "beta_slow": 0.5}
SCALINGS: dict[str, Raw | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


OF_T5_KEYS: Raw = {
    "d_model": 32,
    "d_ff": 56,
    "d_kv": 6,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 8,
    "vocab_size": 131,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
OF_BART_KEYS: Raw = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "activation_function": "gelu",
    "scale_embedding": False,
    "pad_token_id": 1,
}
OF_ROBERTA: Raw = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
OTHER_WORDS: dict[str, Raw] = {
    **dict.fromkeys(OF_T5, OF_T5_KEYS),
    **dict.fromkeys(OF_BART, OF_BART_KEYS),
    "roberta": OF_ROBERTA,
}
"""Family -> the keys of its config.json, if they aren't Llama's."""


def raw_config(name: str, **keys: Any) -> Raw:
    """A complete config.json without keys that changed between transformers 4 and 5."""
    table = families()[name]
    model = {"architectures": [table.architectures[0]], "model_type": table.model_type}
    if name in OTHER_WORDS:
        return {**model, **OTHER_WORDS[name], **keys}
    return {
        **model,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **EXPERT_KEYS.get(name, {}),
        **OWN_KEYS.get(name, {}),
        **(LINEAR_KEYS if name == "qwen3_5" else {}),
        **keys,
    }


def raw_gpt2(**keys: Any) -> Raw:
    """A complete config.json of a GPT-2, which has other keys."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 131,
        "layer_norm_epsilon": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return family_of_hf(raw, "config.json").read_hf(raw)


def in_old_keys(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    base = "rotary_emb_base" if raw["model_type"] == "gpt_neox" else "rope_theta"
    return raw | {
        base: theta,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }


def in_new_keys(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    return raw | {
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "dtype": "bfloat16",
    }


IN_TENSORS = (
    *(
        "layers.count",
        "layers.mixer",
        "layers.mlp",
        "hidden",
        "vocab",
        "tie_embeddings",
        "mtp_layers",
        "mlp.ffn",
        "mlp.bias",
        "mlp.gated",
        "dtype",
    ),
    *("attention.qkv_bias", "attention.o_bias", "attention.qk_norm", "attention.sinks"),
    *("experts.count", "experts.shared_gate", "experts.router_bias", "experts.latent"),
)


def found_in_tensors(config: ModelConfig, *more: str) -> dict[str, Any]:
    """The fields that a loader reads from the tensors."""
    placed = () if config.norm.place == "before" else ("norm.place",)
    mixers = ("mamba.heads", "mamba.head_dim") if config.has("mamba_layers") else ()
    mixers += ("convolution.width",) if config.has("convolution_layers") else ()
    return {name: value_of(config, name) for name in (*IN_TENSORS, *placed, *mixers, *more)}


@st.composite
def scalings(draw: Draw) -> Raw | None:
    """Rope scaling that Megatron core can represent."""
    factor = float(draw(st.integers(1, 64)))
    return draw(
        st.sampled_from(
            (
                None,
                {"rope_type": "linear", "factor": factor},
                {"rope_type": "llama3", **LLAMA3, "factor": factor},
                {"rope_type": "yarn", **YARN, "factor": factor},
                {
                    "rope_type": "yarn",
                    **YARN,
                    "mscale": 0.7,
                    "mscale_all_dim": 0.9,
                    "truncate": False,
                },
            )
        )
    )


@st.composite
def gpt2_configs(draw: Draw) -> ModelConfig:
    heads = draw(st.integers(1, 4))
    keys = {
        "n_head": heads,
        "n_embd": heads * draw(st.integers(1, 20)),
        "n_inner": draw(st.none() | st.integers(1, 99)),
        "activation_function": draw(st.sampled_from(("gelu_new", "gelu"))),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
    }
    return read(raw_gpt2(bos_token_id=None, eos_token_id=None, **keys))


@st.composite
def lara_minis(draw: Draw, config: ModelConfig) -> ModelConfig:
    """Every layer has experts. At least one layer is linear, since others have no sizes of linear attention."""
    layers, experts = config.layer_count, draw(st.integers(1, 9))
    words = st.sampled_from(("linear_attention", "sliding_attention", "full_attention"))
    types = draw(st.lists(words, min_size=layers, max_size=layers))
    types[draw(st.integers(0, layers - 1))] = "linear_attention"
    keys = {
        "hidden_size": config.hidden,
        "num_hidden_layers": layers,
        "layer_types": types,
        "sliding_window": draw(st.integers(1, 99)),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(1, 99)),
        "shared_expert_intermediate_size": draw(st.integers(1, 99)),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }
    return read(raw_config("lara_mini", bos_token_id=None, eos_token_id=None, **keys))


DEEPSEEKS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *(
        "dots1",
        "solar_open",
        "hy_v3",
        "exaone_moe",
        "ernie4_5_moe",
        "bailing_moe2",
        "sarvam_mla",
        "sarvam_moe",
    ),
)
"""Families whose experts are described in DeepSeek's manner."""


@st.composite
def a_llama4(draw: Draw, config: ModelConfig) -> ModelConfig:
    """The model has one expert for each token. Megatron's yarn is for heads that rotate by halves."""
    layers = range(config.layer_count)
    with_experts, rotating = (draw(st.sets(st.sampled_from(layers), min_size=1)) for _ in range(2))
    rotates = {
        "layers.count": len(layers),
        "layers.rotates": per_layer(rotating, len(layers), True, False),
    }
    return changed(
        config,
        {
            **families()["llama4"].fixed,
            **families()["llama4"].assumed(rotates),
            "experts.per_token": 1,
            "experts.shared_ffn": config.experts.ffn,
            "layers.mlp": per_layer(with_experts, len(layers), "experts", "dense"),
            "layers.rotates": per_layer(rotating, len(layers), True, False),
            "attention.qk_l2_norm": draw(st.booleans()),
            "positions.scaling": None,
        },
    )


@st.composite
def with_experts(draw: Draw, config: ModelConfig) -> ModelConfig:
    """The model with experts, as its family has them."""
    name, moe_ffn = config.family, draw(st.integers(1, 99))
    # Megatron leaves the weight of a single expert that was chosen by sigmoid scores as it is.
    least = 2 if families()[name].fixed.get("experts.score") == "sigmoid" else 1
    experts = draw(st.integers(least, 9))
    per_token = draw(st.integers(least, experts))
    config = changed(
        config, {"experts.count": experts, "experts.per_token": per_token, "experts.ffn": moe_ffn}
    )
    if name == "llama4":
        return draw(a_llama4(config))
    if name in ("mixtral", "gpt_oss", "olmoe", "minimax_m2"):
        config = changed(config, {"mlp.ffn": moe_ffn, "layers.mlp": "experts"})
        if name == "minimax_m2":
            return changed(config, {"experts.score": "sigmoid", "experts.router_bias": True})
        as_wide = {"hidden": config.attention.heads * config.attention.head_dim}
        return (
            changed(config, {"experts.renormalize": draw(st.booleans()), **as_wide})
            if name == "olmoe"
            else config
        )
    if name in DEEPSEEKS:
        first = 0 if name == "solar_open" else draw(st.integers(0, config.layer_count - 1))
        config = changed(
            config,
            {
                "layers.mlp": per_layer(range(first), config.layer_count, "dense", "experts"),
                "experts.shared_ffn": moe_ffn * draw(st.integers(0, 3)),
                "experts.scale": draw(st.sampled_from((1.0, 2.5))),
            },
        )
        if name == "deepseek_v2":
            return changed(config, {"experts.renormalize": False})
        if name == "ernie4_5_moe":
            own = {
                "experts.scale": None,
                "experts.router_bias": True,
                "positions.interleaved": True,
            }
            return changed(config, own | {"positions.scaling": None})
        config = changed(config, {"experts.score": "sigmoid", "experts.router_bias": True})
        if name == "hy_v3":
            return config
        groups, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        if groups > 1:  # Megatron ranks groups as this class does only then
            config = changed(config, {"experts.count": 8 * groups, "experts.per_token": 2 * topk})
        config = changed(
            config,
            {"experts.groups": groups, "experts.group_topk": topk},
        )
        return (
            changed(config, {"positions.rotary_percent": draw(st.sampled_from((0.25, 0.5, 1.0)))})
            if name in ("glm4_moe", "solar_open", "bailing_moe2")
            else config
        )
    layers = draw(st.sets(st.integers(0, config.layer_count - 1), min_size=1))
    if name in ("lara_mini", "qwen3_5_moe"):
        layers, config = set(range(config.layer_count)), changed(config, {"mlp.ffn": moe_ffn})
    config = changed(
        config,
        {
            "layers.mlp": per_layer(layers, config.layer_count, "experts", "dense"),
            "experts.renormalize": name == "qwen3_5_moe" or draw(st.booleans()),
        },
    )
    shared = draw(st.integers(1, 99))
    if name == "lara_mini":
        return changed(config, {"experts.shared_ffn": shared})
    return (
        changed(config, {"experts.shared_ffn": shared, "experts.shared_gate": True})
        if name in ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
        else config
    )


@st.composite
def with_latent_attention(draw: Draw, config: ModelConfig) -> ModelConfig:
    rope_dim = 2 * draw(st.integers(1, 9))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 99,
    }
    mscales = draw(st.sampled_from(({}, {"mscale": 0.7, "mscale_all_dim": 0.9})))
    return changed(
        config,
        {
            "attention.kv_heads": config.attention.heads,
            "latent.rope_dim": rope_dim,
            "attention.head_dim": rope_dim + draw(st.integers(1, 9)),
            "latent.v_dim": draw(st.integers(1, 9)),
            "latent.kv_rank": draw(st.integers(1, 9)),
            "latent.q_rank": draw(st.integers(0, 9)),
            "positions.scaling": draw(st.sampled_from((None, yarn | mscales))),
        },
    )


@st.composite
def with_indexer(draw: Draw, config: ModelConfig) -> ModelConfig:
    sizes = {
        name: draw(st.integers(1, 9)) for name in ("latent.q_rank", "indexer.heads", "indexer.topk")
    }
    width = config.latent.rope_dim + draw(st.integers(0, 4))
    turning = {"indexer.interleaved": config.family == "glm_moe_dsa"}
    return changed(config, {**sizes, **turning, "indexer.head_dim": width})


QKV_BIAS: Raw = {"attention.qkv_bias": True}
ALL_BIASES: Raw = dict.fromkeys(("attention.qkv_bias", "attention.o_bias", "mlp.bias"), True)
CHOICES: dict[str, tuple[Raw, ...]] = {
    "seed_oss": ({}, QKV_BIAS, ALL_BIASES),
    "smollm3": ({}, ALL_BIASES, {"layers.window": 5}),
    "nemotron": ({"positions.rotary_percent": 0.5}, ALL_BIASES),
    "jais2": (ALL_BIASES, {}),
    "arcee": ({}, ALL_BIASES),
    "starcoder2": (ALL_BIASES, ALL_BIASES | {"layers.window": 5}),
    "stablelm": ({"positions.rotary_percent": 0.25}, QKV_BIAS),
    "glm": ({}, QKV_BIAS, QKV_BIAS | {"positions.rotary_percent": 0.5}),
    "ernie4_5": ({}, ALL_BIASES),
    "internlm3": ({}, ALL_BIASES),
    "gpt_neox": (ALL_BIASES | {"positions.rotary_percent": 0.5},),
    "iquestcoder": ({}, ALL_BIASES),
}
"""Variants of the models of these families."""


@st.composite
def one_of_choices(draw: Draw, config: ModelConfig) -> ModelConfig:
    name, layers = config.family, config.layer_count
    found = {**families()[name].fixed, **draw(st.sampled_from(CHOICES[name]))}
    if name == "smollm3":
        found["layers.rotates"] = per_layer(
            draw(st.sets(st.integers(0, layers - 1))), layers, False, True
        )
    if name == "gpt_neox":
        found.setdefault("mlp.activation", "gelu_tanh")
        found["attention.kv_heads"] = config.attention.heads
    if name in ("stablelm", "gpt_neox"):
        found["hidden"] = config.attention.heads * config.attention.head_dim
    if found.get("positions.rotary_percent", 1.0) != 1.0 or found.get("positions.interleaved"):
        found["positions.scaling"] = (
            None  # Megatron's yarn is for whole heads that rotate by halves
        )
    return changed(config, found)


@st.composite
def with_windows(draw: Draw, config: ModelConfig) -> ModelConfig:
    """At least some layers have windows. Scaled positions, and windows with another base, are not those of all
    layers."""
    layers = config.layer_count
    windowed = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    config = changed(
        config, {"layers.window": per_layer(windowed, layers, draw(st.integers(1, 99)), None)}
    )
    scaling = config.positions.scaling
    if (scaling or {}).get("rope_type") == "llama3" or (scaling or {}).get("factor") == 1:
        scaling = None
    local = config.positions.theta if scaling else draw(st.sampled_from((None, 12345.5, 100.0)))
    if local == config.positions.theta and not scaling:
        local = None  # the base of all layers, which is written without a second one
    return changed(config, {"positions.scaling": scaling, "positions.local_theta": local})


@st.composite
def gemmas(draw: Draw, config: ModelConfig) -> ModelConfig:
    name, scale = config.family, config.hidden**0.5
    config = changed(
        config,
        {"norm.zero_centered": True, "mlp.activation": "gelu_tanh", "embedding_scale": scale},
    )
    if name == "gemma":
        return config
    scalar = draw(st.sampled_from((config.attention.head_dim, 3, 7)))
    found = None if scalar == config.attention.head_dim else scalar**-0.5
    config = changed(config, {"norm.place": "both", "attention.scale": found})
    if name == "gemma2":
        caps = {
            "attention.score_cap": draw(st.sampled_from((None, 50.0))),
            "head.logit_cap": draw(st.sampled_from((None, 30.0))),
        }
        return changed(config, {**caps, "layers.window": draw(st.none() | st.integers(1, 99))})
    config = draw(
        with_windows(changed(config, {"attention.qk_norm": True, "positions.scaling": None}))
    )
    return changed(
        config, {"positions.local_theta": config.positions.local_theta or config.positions.theta}
    )


@st.composite
def with_lara_layers(draw: Draw, config: ModelConfig) -> ModelConfig:
    """Delta nets, attention with a window and rope, and attention with neither."""
    config = draw(with_linear_attention(config))
    window = draw(st.integers(1, 99))
    windows = tuple(
        window if kind.mixer == "attention" and draw(st.booleans()) else None
        for kind in config.layers
    )
    rotates = tuple(
        kind.mixer == "linear" or size is not None
        for kind, size in zip(config.layers, windows, strict=True)
    )
    return changed(
        config, {"layers.window": one_or_each(windows), "layers.rotates": one_or_each(rotates)}
    )


@st.composite
def configs(draw: Draw) -> ModelConfig:
    """A model that its family's config.json and Megatron's arguments can both describe."""
    name = draw(st.sampled_from(FAMILIES))
    if name == "gpt2":
        return draw(gpt2_configs())
    layers, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    of_head = heads if HEADS_DIVIDE_HIDDEN in families()[name].keys else 1
    config = from_fields(
        name,
        {
            "layers.count": layers,
            "hidden": of_head * draw(st.integers(1, 99)),
            "attention.heads": heads,
            "attention.kv_heads": kv_heads,
            "attention.head_dim": 2 * draw(st.integers(1, 50)),
            "mlp.ffn": draw(st.integers(1, 99)),
            "vocab": draw(st.integers(1, 999)),
            "max_positions": draw(st.integers(1, 9999)),
            "norm.epsilon": draw(st.sampled_from((1e-5, 1e-6, 3e-7))),
            "positions.theta": draw(st.sampled_from((1e4, 5e5, 1e6, 12345.5))),
            "positions.scaling": draw(scalings()),
            "tie_embeddings": draw(st.booleans()),
            "dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        },
    )
    if name == "llama":
        bias = draw(st.booleans())
        return changed(
            config, {"attention.qkv_bias": bias, "attention.o_bias": bias, "mlp.bias": bias}
        )
    if name.startswith("gemma"):
        return draw(gemmas(config))
    if name == "vaultgemma":
        found = draw(gemmas(replace(config, family="gemma2")))
        return changed(replace(found, family=name), {"norm.place": "before"})
    if name in ("cwm", "ministral"):
        windowed = draw(st.sets(st.integers(0, layers - 1)))
        size = draw(st.integers(1, 99)) if windowed else None
        return changed(config, {"layers.window": per_layer(windowed, layers, size, None)})
    if name == "lara_mini":
        return draw(lara_minis(config))
    if name in ("exaone", "granite", "hyperclovax", "internlm2"):
        return config
    if name == "ministral3":
        return changed(
            config, families()[name].assumed({"positions.scaling": config.positions.scaling})
        )
    if name == "helium":
        as_wide = {"hidden": config.attention.heads * config.attention.head_dim}
        return changed(
            config, {"positions.interleaved": True, "positions.scaling": None, **as_wide}
        )
    if name == "youtu":
        return draw(with_latent_attention(config))
    if name == "qwen":
        heads = config.attention.heads
        sizes = {"attention.kv_heads": heads, "hidden": heads * config.attention.head_dim}
        return changed(config, {**sizes, "attention.qkv_bias": True, "positions.scaling": None})
    if name == "mellum":
        config = draw(with_windows(changed(config, {"attention.qk_norm": True})))
        own = {"positions.local_theta": config.positions.local_theta or config.positions.theta}
        return draw(with_experts(changed(config, own)))
    if name in CHOICES:
        return draw(one_of_choices(config))
    if name.startswith("deepseek") or name in ("glm4_moe_lite", "glm_moe_dsa", "sarvam_mla"):
        config = draw(with_latent_attention(draw(with_experts(config))))
        if name == "sarvam_mla":
            config = changed(config, {"latent.q_rank": 0})
        return draw(with_indexer(config)) if name in ("deepseek_v32", "glm_moe_dsa") else config
    if name == "mistral":
        return changed(config, {"layers.window": draw(st.integers(1, 99))})
    if name == "phi3":
        return changed(
            config,
            {"layers.window": draw(st.none() | st.integers(1, 99)), "positions.scaling": None},
        )
    if has_mamba(name):
        return draw(
            with_mamba(changed(config, {"positions.scaling": None, "positions.theta": 1e4}))
        )
    if name in EXPERT_KEYS:
        config = draw(with_experts(config))
    if name == "lara_mini":
        return draw(with_lara_layers(draw(with_experts(config))))
    if has_linear_attention(name):
        percent = 1.0 if (config.positions.scaling or {}).get("rope_type") == "yarn" else 0.25
        config = changed(config, {"positions.rotary_percent": percent})
        return draw(with_linear_attention(config))
    if name in ("olmoe", "minimax_m2"):
        return changed(config, {"attention.qk_norm": True, "attention.qk_norm_width": "all"})
    if name == "glm4":
        turning = {
            "positions.interleaved": True,
            "positions.rotary_percent": draw(st.sampled_from((0.5, 1.0))),
        }
        if (config.positions.scaling or {}).get("rope_type") == "yarn":
            # Megatron's yarn is for heads that rotate by halves.
            config = changed(config, {"positions.scaling": None})
        return changed(
            config, {**turning, "norm.place": "both", "attention.qkv_bias": draw(st.booleans())}
        )
    if name == "exaone4":
        windowed = draw(st.sets(st.integers(0, layers - 1)))
        window, rotating = (
            (draw(st.integers(1, 99)), windowed) if windowed else (None, range(layers))
        )
        kinds = {
            "layers.window": per_layer(windowed, layers, window, None),
            "layers.rotates": per_layer(rotating, layers, True, False),
        }
        return changed(config, {**kinds, "attention.qk_norm": True, "norm.place": "after"})
    if name in ("olmo2", "olmo3"):
        norms = {"attention.qk_norm": True, "attention.qk_norm_width": "all", "norm.place": "after"}
        return (
            draw(with_windows(changed(config, norms)))
            if name == "olmo3"
            else changed(config, norms)
        )
    if name in ("glm4_moe", "solar_open", "bailing_moe2"):
        if (
            config.positions.rotary_percent != 1
            and (config.positions.scaling or {}).get("rope_type") == "yarn"
        ):
            # Megatron's yarn rotates whole heads only.
            config = changed(config, {"positions.scaling": None})
        qk_norm = name != "solar_open" and draw(st.booleans())
        return changed(
            config, {"attention.qkv_bias": draw(st.booleans()), "attention.qk_norm": qk_norm}
        )
    if name in ("ernie4_5_moe", "llama4"):
        return config
    if name == "sarvam_moe":
        return changed(
            config,
            {"attention.qkv_bias": draw(st.booleans()), "attention.qk_norm": draw(st.booleans())},
        )
    if name in ("dots1", "hy_v3", "exaone_moe"):
        config = changed(config, {"attention.qk_norm": True})
        if name == "hy_v3":
            return config
        windowed = draw(st.sets(st.integers(0, layers - 1), min_size=1))
        found = {"layers.window": per_layer(windowed, layers, draw(st.integers(1, 99)), None)}
        rotates = per_layer(windowed, layers, True, False) if name == "exaone_moe" else True
        return changed(config, found | {"layers.rotates": rotates})
    if name == "gpt_oss":
        experts = {
            "mlp.activation": "quick_gelu",
            "mlp.clamp": draw(st.sampled_from((7.0, 5.5))),
            "mlp.offset": 1.0,
        }
        biases = dict.fromkeys(
            ("attention.qkv_bias", "attention.o_bias", "mlp.bias", "attention.sinks"), True
        )
        config = changed(config, {**experts, **biases})
    if name in ("mixtral", "qwen3_moe"):
        window = draw(st.none() | st.integers(1, 99))
        return changed(config, {"layers.window": window, "attention.qk_norm": name == "qwen3_moe"})
    if name != "gpt_oss":
        config = changed(
            config,
            {
                "attention.qkv_bias": name in ("qwen2", "qwen2_moe", "mimo"),
                "attention.qk_norm": name == "qwen3",
            },
        )
    windowed = draw(st.sets(st.integers(0, layers - 1)))
    if not windowed or (name == "llama" and len(windowed) == layers):
        return config
    return changed(
        config, {"layers.window": per_layer(windowed, layers, draw(st.integers(1, 99)), None)}
    )


LLAMA = read(in_old_keys(raw_config("llama", bos_token_id=None, eos_token_id=None), 1e4, None))
"""A Llama as Megatron's arguments can describe it: without token ids."""
