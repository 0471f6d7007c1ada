"""Keys of config.json that don't change a model's output for its weights and input, grouped by reason."""

from collections.abc import Mapping

_BY_REASON: Mapping[str, str] = {
    "bookkeeping": """
        _name_or_path architectures auto_map dtype finetuning_task id2label label2id model_type prefix problem_type
        task_specific_params tokenizer_class torch_dtype transformers_version
    """,
    "what a call returns, and how it is computed: the same numbers": """
        _attn_implementation chunk_size_feed_forward output_attentions output_hidden_states output_router_logits
        pretraining_tp reorder_and_upcast_attn return_dict torchscript use_bfloat16 use_cache
    """,
    "the precision in which experts are summed up: Megatron's rounding doesn't depend on it": """
        enable_moe_fp32_combine
    """,
    "the precision of the softmax": """
        attention_softmax_in_fp32 scale_attention_softmax_in_fp32
    """,
    "how Mamba 1 and 2 are computed: kernels, length of chunks, precision of the state and of the residual": """
        chunk_size L_bp_cycles mamba_chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap residual_in_fp32
        use_associative_scan use_falcon_mambapy use_mamba_kernels use_mambapy use_mem_eff_path
    """,
    "how lightning attention is computed: positions of a block": """
        block_size
    """,
    "only for the initialization, and a width that mamba_num_heads gives": """
        embedding_fraction embedding_initializer_range expand final_w_init_variance_scale init_device init_std
        initializer_cutoff_factor initializer_factor initializer_range lambda_std_dev learnable_sink_init linear_a_log_max
        linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min rescale_prenorm_residual time_step_floor
        time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale w_init_variance_scale
    """,
    "for training only": """
        activation_dropout altup_coef_clip attention_dropout attention_probs_dropout_prob attn_pdrop aux_loss_coef
        classifier_dropout dropout dropout_rate emb_pdrop embd_pdrop embed_dropout embedding_dropout hidden_dropout
        hidden_dropout_prob input_jitter_noise layerdrop mlp_dropout mtp_loss_scaling_factor resid_dropout resid_pdrop
        residual_dropout router_aux_loss_coef router_jitter_noise slow_but_exact z_loss_coefficient
        decoder_layerdrop encoder_layerdrop
    """,
    "for generation only: which logits are computed, and the states that a cache keeps": """
        num_logits_to_keep number_of_conv_states
    """,
    "tokens that only generation and tokenizers use": """
        cls_token_id eod_token_id forced_eos_token_id sep_token_id
    """,
    "heads for other tasks, which no model here has": """
        pooling summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """,
}

HARMLESS = frozenset(" ".join(_BY_REASON.values()).split())
