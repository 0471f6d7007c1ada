"""Megatron's arguments that define a model's computation: arguments that are read, and arguments that are refused.

A checkpoint's `args` come from Megatron-LM's parser. Megatron core takes every field of its configuration classes that
it finds there by name. Therefore all fields of TransformerConfig, its bases and subclasses are listed, and all
arguments of the parser. Each is in READ, in REFUSED, or in harmless.HARMLESS.

Sources: the configuration classes and the code that uses them, in the wheels of megatron-core 0.12.0 to 0.19.2 and in
Megatron-LM's tags core_v0.17.0 to core_v0.19.0, and main at d98e8a64ddf3; the parser in the tags v1.0 to core_v0.19.0
and the same commit. tests/megatron/test_known_arguments.py compares them (tests/megatron_fields.py says how to add a release).
"""

from collections.abc import Mapping
from typing import NamedTuple

from megaconv.model.predicting import HYBRID_MTP


class Limit(NamedTuple):
    """The values that an argument may have."""

    accepted: tuple[object, ...]
    """Allowed values. In a list, each item must be one of them. None also stands for a missing argument."""
    computes: str
    """For messages: the argument's meaning, or the effect of any other value."""
    only: str = ""
    """The condition under which the argument matters: `experts`, `gelu`, or `residuals of core`; empty: always."""


_READ = """
    num_layers encoder_num_layers decoder_num_layers ffn_hidden_size num_attention_heads
    group_query_attention num_query_groups kv_channels max_position_embeddings untie_embeddings_and_output_weights
    normalization norm_epsilon layernorm_epsilon apply_layernorm_1p layernorm_zero_centered_gamma
    apply_residual_connection_post_layernorm window_size window_attn_skip_freq
    swiglu quick_geglu openai_gelu squared_relu bias_gelu_fusion glu_linear_offset activation_func_clamp_value
    position_embedding_type use_rotary_position_embeddings relative_attention_max_distance
    rotary_base rotary_percent rotary_interleaved no_rope_freq
    rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor enable_gpt_oss
    yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale
    yarn_mscale_all_dim yarn_correction_range_round_to_int
    attention_output_gate qk_layernorm qk_l2_norm moe_apply_probs_on_input
    experimental_attention_variant linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim
    hybrid_layer_pattern hybrid_override_pattern mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_rope_interleaved
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_score_function
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    rank world_size use_tp_pp_dp_mapping context_parallel_size model_parallel_size
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size data_parallel_size encoder_tensor_model_parallel_size
    encoder_pipeline_model_parallel_size
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split pipeline_model_parallel_layout
    transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm bf16
    vocab_size make_vocab_size_divisible_by tokenizer_type null_tokenizer_eod_id tokenizer_model vocab_file merge_file
    overlap_grad_reduce ddp_num_buckets ddp_bucket_size consumed_train_samples consumed_valid_samples
    decoupled_lr apply_wd_to_qk_layernorm no_weight_decay_cond_type
    softmax_scale
    attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar
    retro_add_retriever retro_chunk_length retro_encoder_layers retro_num_neighbors retro_num_retrieved_chunks
    megaconv_left_out megaconv_latent_norm_epsilon megaconv_least_time_step megaconv_qk_norm_width megaconv_indexer_order
    megaconv_named_by megaconv_model_class
    megaconv_hf_names megaconv_unpredicted_tokens megaconv_renormalized_experts megaconv_bias_on_logits
"""
READ = frozenset(_READ.split())
"""The arguments of a checkpoint that megaconv reads."""

LIMITED: Mapping[str, Limit] = {
    "position_embedding_type": Limit(
        (None, "rope", "yarn", "learned_absolute", "relative", "none"), "how positions enter"
    ),
    "normalization": Limit((None, "RMSNorm", "LayerNorm"), "the kind of norm"),
    "rope_type": Limit((None, "rope", "yarn"), "how the rotations of latent attention are scaled"),
    "experimental_attention_variant": Limit((None, "gated_delta_net", "dsa"), "another attention"),
    "moe_router_score_function": Limit(
        (None, "softmax", "sigmoid"),
        "how a router's logits become the experts' weights",
        only="experts",
    ),
    "apply_residual_connection_post_layernorm": Limit(
        (None, False), "the residual is taken behind the norm", only="residuals of core"
    ),
}
"""The values of arguments in READ that megaconv supports."""

_CONFIGURATION: Mapping[str, Limit] = {
    "softmax_type": Limit(
        (None, "vanilla", "learnable"), "the softmax of attention has a constant sink, which no tensor shows"
    ),
    "mrope_section": Limit((None,), "rotary positions have three parts, for time, height and width"),
    "activation_func": Limit((None,), "an activation that no argument of Megatron-LM's own stands for"),
    "use_te_activation_func": Limit(
        (None, False), "Transformer Engine's gelu, which is the approximate one", only="gelu"
    ),
    "use_transformer_engine_op_fuser": Limit(
        (None, False), "Transformer Engine's gelu, which is the approximate one", only="gelu"
    ),
    "moe_router_load_balancing_type": Limit(
        (None, "aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        "experts are not chosen by their scores alone, or are weighed otherwise",
        only="experts",
    ),
    "moe_router_topk_limited_devices": Limit((None, 0), "experts are chosen on a few devices only", only="experts"),
    "moe_router_force_load_balancing": Limit((None, False), "experts are chosen at random", only="experts"),
    "moe_router_force_biased": Limit((None,), "experts are chosen with a random bias", only="experts"),
    "moe_input_jitter_eps": Limit((None,), "routers see their input with noise, when the model is used too", only="experts"),
    "moe_token_dropping": Limit((None, False), "experts drop tokens", only="experts"),
    "moe_expert_rank_capacity_factor": Limit(
        (None,), "ranks of experts drop tokens beyond their capacity, when the model is used too", only="experts"
    ),
    "moe_mlp_glu_interleave_size": Limit(
        (None,), "rows of gate and up alternate in the experts' first matrix", only="experts"
    ),
    "moe_shared_expert_glu_interleave_size": Limit(
        (None,), "rows of gate and up alternate in the shared expert's first matrix", only="experts"
    ),
    "heterogeneous_block_specs": Limit((None, False), "layers differ from each other"),
    "mtp_use_repeated_layer": Limit((None, False), "one MTP layer predicts all further tokens"),
    "mtp_hybrid_override_pattern": Limit((None, HYBRID_MTP), "MTP layers are of other kinds than attention and experts"),
    "dsa_indexer_topk_freq": Limit((None, 1), "layers share what one of them has chosen"),
    "dsa_indexer_scoring_relu": Limit((None, True), "an indexer's scores may be negative"),
    "dsa_indexer_k_norm_epsilon": Limit((None, 1e-6), "an indexer's norm has another epsilon"),
    "use_mup": Limit((None, False), "embeddings, attention scores and logits are scaled (muP)"),
    "enable_mhc_connections": Limit((None, False), "several residual streams, which are mixed (hyper-connections)"),
}  # fmt: skip
"""Fields of the configuration classes."""

_PARSER: Mapping[str, Limit] = {
    # core_v0.4.0 and later. Megatron's own modules for supported models are accepted.
    "spec": Limit(
        (
            None,
            "local",
            "megatron.core.models.gpt.gpt_layer_specs",
            "get_gpt_layer_local_spec",
            "get_gpt_layer_with_transformer_engine_spec",
            "gpt_layer_with_transformer_engine_spec_moe",
            "gpt_layer_local_spec_moe",
            "megatron.core.models.bert.bert_layer_specs",
            "bert_layer_local_spec",
            "bert_layer_with_transformer_engine_spec",
            "megatron.core.models.mamba.mamba_layer_specs",
            "mamba_stack_spec",
            "megatron.core.models.hybrid.hybrid_layer_specs",
            "hybrid_stack_spec",
        ),
        "layers are made of modules of the user's own, or of another kind of model",
    ),
    # core_v0.12.0 and later.
    "heterogeneous_layers_config_path": Limit((None, ""), "layers differ from each other"),
    "heterogeneous_layers_config_encoded_json": Limit((None, ""), "layers differ from each other"),
    # megatron/post_training/arguments.py, core_v0.13.0 and later.
    "export_qk_l2_norm": Limit(
        (None, False), "queries and keys are divided by their L2 norm, as in Llama 4"
    ),
    "export_moe_apply_probs_on_input": Limit(
        (None, False),
        "experts' inputs are multiplied by the routers' weights, not their outputs",
        only="experts",
    ),
    # megatron/elastification/arguments.py, core_v0.18.0 and later.
    "flextron": Limit((None, False), "a router chooses which parts of the model compute"),
}
"""Arguments that aren't fields."""

REFUSED: Mapping[str, Limit] = {**_CONFIGURATION, **_PARSER}
"""Arguments that megaconv doesn't read. They change the model's computation unless they have one of these values."""
