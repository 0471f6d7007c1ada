"""Flags of Megatron-LM that are no settings here: those without effect, and those that would change a run.

Together with the settings they are all flags of Megatron core 0.19's parser, megatron/training/arguments.py; a test
compares them.
"""

ANY_NUMBER = -1


def _words(count: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), count)


WITHOUT_EFFECT = {
    **_words(
        0,
        """
        accumulate_allreduce_grads_in_fp32 adlr_autoresume align_param_gather apply_query_key_layer_scaling
        async_ckpt_use_cpu_shm attention_softmax_in_fp32 auto_detect_ckpt_format cache_mla_latents calc_ft_timeouts calculate_per_token_loss
        ckpt_assume_constant_structure ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_save
        cpu_offloading_retain_pinned_cpu_buffers create_all_gather_group cross_entropy_loss_fusion dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw deep_init defer_embedding_wgrad_compute
        delay_offload_until_cuda_graph delay_wgrad_compute disable_align_grad_reduce disable_ckpt_load_validate_sharding_integrity
        disable_clone_scatter_output_in_embedding disable_flight_recorder_dump_on_timeout disable_flight_recorder_extra_dump_on_exec
        disable_flight_recorder_include_only_active disable_gloo_process_groups disable_jit_fuser disable_log_loss_scale_to_tensorboard
        disable_mamba_mem_eff_path disable_manual_gc_eval disable_msc disable_straggler_on_startup
        disable_stream_ckpt_dequant disable_strict_fsdp_dtensor_load disable_symmetric_registration disable_tp_comm_bulk_dgrad
        disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_split_ag disable_tp_comm_split_rs
        disable_use_tokenizer_model_from_checkpoint_args dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014
        distrib_optim_fully_reshardable_mem_efficient distribute_saved_activations embedding_weights_in_fp32 enable_cuda_graph
        enable_experimental enable_ft_package enable_msc ep_overlap_early_attn_memory_release exit_signal_handler
        exit_signal_handler_for_dataloader exit_signal_handler_for_training external_cuda_graph fine_grained_activation_offloading
        flight_recorder_include_stack_trace fp8_param_gather fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer
        fsdp_manual_registration fused_residual_rmsnorm high_priority_a2a_comm_stream inference_rng_tracker
        inference_use_synchronous_zmq_collectives init_model_with_meta_device inprocess_empty_cuda_cache inprocess_restart
        keep_fp8_transpose_cache lazy_loader lazy_mpu_init log_device_memory_used log_energy log_loss_scale_to_tensorboard
        log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress log_straggler log_throughput log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer mla_down_proj_fusion moe_enable_deepep moe_grouped_gemm moe_hybridep_pad_uneven_dispatch_inputs
        moe_layer_recompute moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash
        moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight
        moe_use_legacy_grouped_gemm no_align_grad_reduce no_align_param_gather no_async_tensor_model_parallel_allreduce
        no_barrier_with_level_1_timing no_bias_dropout_fusion no_bias_swiglu_fusion no_ckpt_fully_parallel_save
        no_ckpt_load_validate_sharding_integrity no_clone_scatter_output_in_embedding no_create_attention_mask_in_dataloader
        no_flight_recorder_dump_on_timeout no_flight_recorder_extra_dump_on_exec no_flight_recorder_include_only_active
        no_gradient_reduce_div_fusion no_load_rng no_log_loss_scale_to_tensorboard no_masked_softmax_fusion no_mmap_bin_files no_one_logger
        no_overlap_p2p_communication no_persist_layer_norm no_pin_cpu_grads no_pin_cpu_params no_rope_fusion no_save_rng
        no_stream_ckpt_dequant no_strict_fsdp_dtensor_load no_tp_comm_bulk_dgrad no_tp_comm_bulk_wgrad no_tp_comm_overlap_ag
        no_tp_comm_overlap_rs no_tp_comm_split_ag no_tp_comm_split_rs no_use_layer_wise_param_layout
        no_use_tokenizer_model_from_checkpoint_args nvtx_ranges one_logger_async optimizer_cpu_offload optimizer_cuda_graph
        overlap_cpu_optimizer_d2h_h2d overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
        overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step override_opt_param_scheduler
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes record_memory_history
        record_shapes resume_dataloader retro_no_verify_neighbor_count reuse_grad_buf_for_mxfp8_param_ag run_workload_inspector_server
        strict_lambada te_rng_tracker torch_fsdp2_no_reshard_after_forward tp_comm_overlap tp_comm_overlap_rs_dgrad trust_remote_code
        use_checkpoint_args use_cpu_initialization use_dist_ckpt use_flash_attn
        use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_mcore_models
        use_nccl_ub use_persistent_ckpt_worker use_ring_exchange_p2p use_sharp use_te_activation_func
        use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping use_transformer_engine_op_fuser
        """,
    ),
    **_words(
        1,
        """
        activation_offload_fraction adlr_autoresume_interval app_tag_run_name app_tag_run_version async_ckpt_cpu_priority
        async_ckpt_io_priority async_strategy cache_dir ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_process_group
        ckpt_fully_parallel_save_process_group config_logger_dir cross_entropy_fusion_impl cuda_graph_impl cuda_graph_warmup_steps DDP_impl
        ddp_num_buckets delta_offload_bytes_across_pp_ranks dist_ckpt_strictness dist_ckpt_workers
        distributed_timeout_seconds_after_init dsa_kernel_backend dump_param_to_param_group_map empty_unused_memory_level
        fine_grained_offloading_max_inflight_offloads flash_attention_version flight_recorder_dump_path flight_recorder_trace_buffer_size
        ft_num_warmup_iters gpu_sniff_test_interval inprocess_active_world_size inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout
        inprocess_last_call_wait inprocess_max_iterations inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_soft_timeout inprocess_termination_grace_time local_rank log_memory_interval
        logging_level memory_snapshot_path microbatch_group_size_per_virtual_pipeline_stage
        min_offloaded_tensor_size mlp_chunks_for_prefill mlp_chunks_for_training moe_deepep_num_sms moe_flex_dispatcher_backend
        moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_page_size nccl_communicator_config_path num_dataset_builder_threads num_workers object_storage_cache_path
        one_logger_project one_logger_run_name optimizer_offload_fraction overlapping_eval per_dataset_sequences_path
        pipeline_model_parallel_comm_backend rerun_mode result_rejected_tracker_filename sharp_enabled_group straggler_ctrlr_port
        straggler_minmax_count suggested_communication_unit_size tensorboard_log_interval tensorboard_queue_size timing_log_level
        timing_log_option tp_comm_bootstrap_backend tp_comm_overlap_cfg train_sync_interval wandb_entity wandb_save_dir wgrad_deferral_limit
        """,
    ),
    **_words(
        ANY_NUMBER,
        "cuda_graph_modules cuda_graph_scope high_priority_stream_groups offload_modules recompute_modules",
    ),
}
"""Flags that have no effect here -> number of their values. They are accepted and named in the log.

They choose kernels, communication, memory, logs, or what happens here in any case.
"""


def _because(feature: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), feature)


REFUSED = {
    **_because("a schedule from the checkpoint", "use_checkpoint_opt_param_scheduler"),
    **_because(
        "a layout from the checkpoint (give --tensor-model-parallel-size and the others)",
        "use_mp_args_from_checkpoint_args",
    ),
    **_because("hashes of a checkpoint's files (megaconv seal makes them)", "verify_integrity"),
    **_because("learning tokens that pad", "allow_ambiguous_pad_tokens"),
    **_because("another signal than SIGTERM and SIGINT", "exit_signal"),
    **_because("another surplus of samples than 0.005", "mid_level_dataset_surplus"),
    **_because("yarn with other turns than 32 and 1", "beta_fast beta_slow"),
    **_because("master weights in less than fp32", "main_params_dtype"),
    **_because(
        "norms of the sums of each sublayer, as in the original BERT,",
        "apply_residual_connection_post_layernorm",
    ),
    **_because(
        "tensor ranks of an encoder that are not its decoder's",
        "encoder_tensor_model_parallel_size",
    ),
    **_because(
        "a choice of experts at random, which measures speed alone,",
        "moe_router_force_load_balancing",
    ),
    **_because("one matrix of q, k and v", "muon_no_split_qkv"),
    **_because("a kernel of its own", "muon_use_syrk"),
    **_because(
        "a model without any positions (with --position-embedding-type rope the flag is accepted)",
        """
        no_position_embedding
        """,
    ),
    **_because(
        "this kind of tensor or context ranks",
        """
        expert_tensor_parallel_num_weight_shards hybrid_context_parallel max_seqlen_per_dp_cp_rank tensor_parallel_num_weight_shards
        """,
    ),
    **_because("a model without initial weights", "no_initialization"),
    **_because(
        "this form of layers for multi-token prediction",
        """
        mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone mtp_use_repeated_layer
        """,
    ),
    **_because(
        "this form of attention",
        """
        dataloader_inter_document_masking kitchen_attention_backend qk_l2_norm relative_attention_max_distance
        relative_attention_num_buckets softmax_type use_kitchen_attention window_attn_skip_freq window_size
        """,
    ),
    **_because(
        "this form of MLP",
        """
        activation_func_clamp_value glu_linear_offset moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size openai_gelu
        quick_geglu
        """,
    ),
    **_because(
        "this form of positions",
        """
        mrope_section no_rope_freq no_yarn_correction_range_round_to_int rotary_interleaved rotary_seq_len_interpolation_factor
        yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_original_max_position_embeddings
        """,
    ),
    **_because(
        "sparse attention described by flags",
        """
        disable_dsa_indexer_rotate_activation disable_dsa_indexer_scoring_relu dsa_indexer_head_dim dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_skip_topk_offset
        dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss no_dsa_indexer_rotate_activation no_dsa_indexer_scoring_relu
        """,
    ),
    **_because(
        "this way of initial weights",
        """
        data_parallel_random_init embedding_init_method_std init_method_xavier_uniform mup_attn_scale_power mup_base_head_dim
        mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult use_mup
        """,
    ),
    **_because(
        "this precision",
        """
        batch_invariant_mode ddp_param_name_patterns_for_fp32_local_accumulation ddp_reduce_scatter_with_fp32_accumulation
        disable_bf16_reduced_precision_matmul disable_fp8_wgrad fp16_lm_cross_entropy fp32_residual_connection fp4_format fp4_param_gather
        fp4_quantizer_factory fp4_recipe fp8_interval fp8_output_proj
        fp8_quantizer_factory mamba_training_ssm_states_dtype onnx_safe te_precision_config_file
        """,
    ),
    **_because(
        "this choice or weighing of experts",
        """
        moe_apply_probs_on_input moe_enable_routing_replay moe_expert_rank_capacity_factor moe_input_jitter_eps moe_router_force_biased
        moe_router_quantile_balancing_ema
        """,
    ),
    **_because(
        "making experts from a dense model (megaconv convert --num-experts makes them)",
        "moe_upcycling_granularity moe_use_upcycling",
    ),
    **_because(
        "a file that describes layers of different kinds",
        """
        heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
        """,
    ),
    **_because(
        "this form of the optimizer",
        """
        apply_wd_to_qk_layernorm lion_beta1 lion_beta2 muon_nesterov muon_scalar_optimizer no_weight_decay_cond_type
        """,
    ),
    **_because("a batch size that follows the number of ranks", "decrease_batch_size_if_needed"),
    **_because(
        "leaving out or watching single steps",
        """
        check_for_large_grads check_for_spiky_loss iterations_to_skip phase_transition_iterations
        """,
    ),
    **_because("training of some parameters alone (LoRA is --lora-rank)", "freeze_all_layers"),
    **_because(
        "a checkpoint of single tensors",
        """
        load_main_params_from_ckpt save_activations_interval save_dgrads_interval save_params_interval save_tokens_per_expert_interval
        save_wgrads_interval
        """,
    ),
    **_because(
        "a checkpoint that is kept for a time or in memory",
        """
        non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir
        non_persistent_save_interval persistent_save_interval replication replication_factor replication_jump save_retain_interval
        """,
    ),
    **_because("another number for a loaded iteration", "override_ckpt_iteration"),
    **_because(
        "sharding over a part of the data-parallel ranks",
        """
        enable_full_sharding_in_hsdp num_distributed_optimizer_instances outer_dp_sharding_strategy
        """,
    ),
    **_because(
        "Megatron's own FSDP",
        """
        megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        """,
    ),
    **_because("a run without communication, for tests", "fake_process_group test_mode"),
    **_because(
        "this way of evaluation",
        """
        eval_global_batch_size eval_micro_batch_size full_validation multiple_validation_sets start_eval_at_iter validation_set_names
        """,
    ),
    **_because(
        "fill in the middle",
        """
        fim_data fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample
        fim_spm_rate fim_suffix_token
        """,
    ),
    **_because("a share of the samples", "sample_rate"),
    **_because(
        "this setting of a tokenizer",
        """
        disable_tokenizer_sentencepiece_ignore_extra_whitespaces no_tokenizer_sentencepiece_ignore_extra_whitespaces null_tokenizer_eod_id
        null_tokenizer_pad_id padded_vocab_size tiktoken_num_special_tokens tiktoken_pattern tokenizer_hf_no_include_special_tokens
        tokenizer_hf_no_use_fast tokenizer_metadata tokenizer_sentencepiece_legacy tokenizer_special_tokens
        """,
    ),
    **_because("evidence of REALM", "embedding_path evidence_data_path"),
    **_because(
        "training on images",
        """
        classes_fraction data_per_class_fraction dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size dino_local_crops_number
        dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp dino_warmup_teacher_temp_epochs head_lr_mult
        img_h img_w iter_per_epoch mask_factor mask_type no_data_sharding num_channels num_classes patch_dim swin_backbone_type
        vision_backbone_type vision_pretraining vision_pretraining_type
        """,
    ),
    **_because(
        "a record of the experts' choices",
        """
        moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
        moe_routing_trace_max_training_iters moe_routing_trace_path
        """,
    ),
    **_because(
        "distillation from stored logits",
        """
        logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
        logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p logits_save_top_p_min_k
        """,
    ),
    **_because("writing a BERT's embeddings", "bert_embedder_type output_bert_embeddings"),
    **_because(
        "making faults on purpose",
        """
        error_injection_rate error_injection_type fault_injector_delay_start_iteration fault_injector_fault_delay
        fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks
        fault_injector_offset_seconds fault_injector_ranks fault_injector_seed
        """,
    ),
    **_because(
        "a setting of Megatron's inference engine",
        """
        decode_only_cuda_graphs enable_chunked_prefill flash_decode mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
        max_tokens_to_oom
        moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill num_speculative_tokens symmetric_ar_type
        use_legacy_static_engine
        use_same_sampling_seed_across_dp_ranks
        """,
    ),
}
"""Flags that would change a run -> the unsupported feature."""

REFUSED_PREFIXES = {
    "inference_": "a setting of Megatron's inference engine",
    "no_inference_": "a setting of Megatron's inference engine",
    "grpo_": "a setting of Megatron's RL",
    "rl_": "a setting of Megatron's RL",
    "no_rl_": "a setting of Megatron's RL",
}
"""The beginning of further such flags -> the unsupported feature."""

NOT_YET = {
    "dataloader_type": "single",
}
"""Flags with only one supported value -> this value."""


def refused_feature(name: str) -> str | None:
    """Return the unsupported feature that a flag asks for; None for a flag that is not in these tables."""
    beginnings = (what for prefix, what in REFUSED_PREFIXES.items() if name.startswith(prefix))
    return REFUSED.get(name) or next(beginnings, None)
