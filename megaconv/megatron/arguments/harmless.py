"""Megatron's arguments that don't change the computation of a saved model, grouped by reason.

Sources: as in known.py. An argument whose effect ends with the run belongs here. An argument that needs a second look
belongs in known.REFUSED.
"""

from collections.abc import Mapping

_BY_REASON: Mapping[str, str] = {
    "the tensors themselves show it": """
        add_bias_linear add_position_embedding add_qkv_bias bert_binary_head deprecated_use_mcore_models export_draft_vocab_size
        export_eagle_algorithm export_num_eagle_layers export_num_medusa_heads export_num_mtp export_offline_model gated_linear_unit
        hidden_size hybrid_attention_ratio hybrid_mlp_ratio is_hybrid_model linear_attention_freq
        mla_down_proj_fusion model_type modelopt_enabled moe_latent_size moe_layer_freq moe_router_enable_expert_bias
        moe_shared_expert_gate moe_single_grouped_bias moe_single_grouped_weight mtp_num_layers num_experts num_moe_experts
        num_unique_layers param_sharing_style relative_attention_num_buckets use_grouped_gemm_for_dense_mlp
        use_grouped_gemm_for_shared_expert use_legacy_models use_mcore_models
    """,
    "Megatron sets it from other arguments, or ignores it": """
        async_tensor_model_parallel_allreduce bias_activation_fusion fp4_param fp8_param moe_extended_tp
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage persist_layer_norm pipeline_dtype
    """,
    "of an indexer of sparse attention: how it is trained, rounded and computed; the offset counts with a dsa_indexer_topk_freq alone": """
        dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_rotate_activation dsa_indexer_skip_topk_offset
        dsa_indexer_use_sparse_loss dsa_kernel_backend
    """,
    "of linear attention that core 0.16.1 has not: only with other values of experimental_attention_variant": """
        experimental_attention_variant_loss_scale_func gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder
    """,
    "of Mamba's layers: which kernels, and in which precision their states are": """
        disable_mamba_mem_eff_path mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
        mamba_training_ssm_states_dtype use_mamba_mem_eff_path
    """,
    "of layers that differ: only with heterogeneous_layers_config_path, which is refused": """
        per_block_parameters
    """,
    "of muP: only with use_mup, which is refused": """
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
    """,
    "of hyper-connections: only with enable_mhc_connections, which is refused": """
        mhc_init_gating_factor mhc_num_residual_streams mhc_recompute_layer_num mhc_sinkhorn_iterations
    """,
    "of Retro: the data of a run, its dropouts, and a gate that Megatron core ignores": """
        retro_attention_gate retro_bert_tokenizer_type retro_bert_vocab_file retro_block_size
        retro_cyclic_train_iters retro_encoder_attention_dropout retro_encoder_hidden_dropout
        retro_encoder_num_layers retro_neighbor_dirs retro_project_dir
        retro_retrieved_length retro_return_doc_ids retro_split_preprocessing retro_verify_neighbor_count retro_workdir
    """,
    "of the tokens that experts drop, by the load of each microbatch; a reader is told": """
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
    """,
    "of routers: only with a load balancing that is refused": """
        moe_router_quantile_balancing_ema
    """,
    "of Flextron: only with flextron, which is refused": """
        add_skipping binary_mask bpe_kv_cache bpe_max_buffer bpe_params bpe_ssm_cache budget_list budget_probs budget_type
        curr_iteration disable_budget distill_coeff distill_only distillation emb_int_list emb_per_list enable_router
        flex_hetero_ffn flex_hetero_mamba flex_hetero_moe_expert flex_strict flextron_config_file force_emb force_mamba force_mlp
        force_router_skip freeze_model freeze_router hard_sample_th is_flex_eval layer_ranking_list linear_scaler_end
        linear_scaler_start log_budgets loss_alpha lr_mult_router mamba_int_list mamba_per_list mem_batch_size mem_infer_seq_len
        min_scale mlp_int_list mlp_per_list moe_expert_int_list moe_expert_per_list no_attn_skip normalize_router_logits
        original_model_sample_prob override_selected_budget param_budget_target prefill_chunk_size router_beta router_gbs
        router_inter_dim router_std skip_num_attn_layer_constraint skip_total_layer_constraint slice soft_mask tau_decay tau_init
    """,
    "of models for images, which no family has, and of retrievers, whose towers are seen from their tensors": """
        bert_embedder_type bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path
        classes_fraction data_per_class_fraction data_sharding dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
        dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs embedding_path evidence_data_path faiss_use_gpu ict_head_size ict_load img_dim img_h img_w
        indexer_batch_size indexer_log_interval iter_per_epoch mask_factor mask_type num_channels num_classes
        output_bert_embeddings patch_dim query_in_block_prob report_topk_accuracies retriever_report_topk_accuracies
        retriever_score_scaling retriever_seq_length swin_backbone_type titles_data_path use_one_sent_docs vision_backbone_type
        vision_pretraining vision_pretraining_type
    """,
    "flags of Megatron-LM's tasks/main.py, and what its finetuning adds to them": """
        faiss_match faiss_topk_retrievals orig_global_batch_size orig_micro_batch_size overlapping_eval qa_data_dev
        qa_data_test strict_lambada train_hard_neg train_iters_per_epoch train_with_neg val_av_rank_hard_neg val_av_rank_other_neg
    """,
    "precision: the same function, rounded otherwise": """
        ammo_convert_te_to_local_spec ammo_load_classic_megatron_to_mcore ammo_quant_cfg apply_query_key_layer_scaling
        attention_softmax_in_fp32 autocast_dtype disable_bf16_reduced_precision_matmul embedding_weights_in_fp32 enable_autocast
        export_kv_cache_quant export_quant_cfg export_real_quant_cfg first_last_layers_bf16 fp16 fp16_lm_cross_entropy
        fp32_residual_connection fp4 fp4_param_gather fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo
        fp8_amax_history_len fp8_dot_product_attention fp8_e4m3 fp8_hybrid fp8_interval fp8_margin fp8_multi_head_attention
        fp8_output_proj fp8_param_gather fp8_quantizer_factory fp8_recipe fp8_wgrad keep_fp8_transpose_cache
        keep_fp8_transpose_cache_when_using_custom_fsdp kitchen_attention_backend kitchen_config_file kitchen_recipe_number
        logit_dtype moe_combine_bwd_dtype moe_dispatch_fwd_dtype moe_router_dtype moe_router_padding_for_fp8
        moe_router_padding_for_quantization num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 params_dtype quant_recipe
        te_precision_config_file tp_only_amax_red use_kitchen use_kitchen_attention
    """,
    "kernels and fusions of the same function": """
        allow_transformer_engine apply_rope_fusion attention_backend bias_dropout_fusion bias_swiglu_fusion
        cross_entropy_fusion_impl cross_entropy_loss_fusion deterministic_mode disable_jit_fuser flash_attention_version
        fused_residual_rmsnorm fused_single_qkv_rope gradient_accumulation_fusion masked_softmax_fusion
        memory_efficient_layer_norm moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_fusion moe_use_grouped_tensor
        no_persist_layer_norm onnx_safe scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion use_flash_attn
        use_fused_weighted_squared_relu
    """,
    "recomputation, offloading, memory": """
        _cpu_offloading_context activation_func_fp8_input_store activation_offload_fraction activations_checkpoint_method
        activations_checkpoint_num_layers checkpoint_activations checkpoint_num_layers clone_scatter_output_in_embedding
        cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights deallocate_pipeline_outputs
        delta_offload_bytes_across_pp_ranks disable_parameter_transpose_cache distribute_checkpointed_activations
        distribute_saved_activations empty_unused_memory_level fine_grained_activation_offloading
        fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size moe_layer_recompute moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        num_microbatches_with_partial_activation_checkpoints offload_modules recompute_activations recompute_granularity
        recompute_method recompute_modules recompute_num_layers
    """,
    "CUDA graphs": """
        cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_scope_deprecated
        cuda_graph_use_single_mempool cuda_graph_warmup_steps delay_offload_until_cuda_graph enable_cuda_graph external_cuda_graph
        optimizer_cuda_graph
    """,
    "communication": """
        align_grad_reduce align_param_gather batch_p2p_comm batch_p2p_sync cp_comm_type create_all_gather_group
        data_parallel_sharding_strategy ddp_average_in_collective DDP_impl ddp_pad_buckets_for_high_nccl_busbw
        ddp_param_name_patterns_for_fp32_local_accumulation ddp_reduce_scatter_with_fp32_accumulation
        defer_embedding_wgrad_compute delay_grad_reduce delay_param_gather delay_wgrad_compute disable_symmetric_registration
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init enable_full_sharding_in_hsdp
        enable_gloo_process_groups ep_overlap_early_attn_memory_release fake_process_group flight_recorder_dump_on_timeout
        flight_recorder_dump_path flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
        flight_recorder_include_stack_trace flight_recorder_trace_buffer_size fp32_allreduce fsdp_db_use_persist_buf_on_alloc_fail
        fsdp_double_buffer fsdp_manual_registration gradient_reduce_div_fusion gtp_expert_remat_nccl_ub gtp_remat_nccl_ub
        gtp_remat_reduce_scatter_with_fp32_accumulation high_priority_a2a_comm_stream high_priority_stream_groups
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer megatron_fsdp_version
        microbatch_group_size_per_vp_stage moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend
        moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_shared_expert_overlap moe_token_dispatcher_type nccl_communicator_config_path nccl_ub outer_dp_sharding_strategy
        overlap_cpu_optimizer_d2h_h2d overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
        overlap_p2p_comm overlap_p2p_comm_warmup_flush overlap_param_gather overlap_param_gather_with_optimizer_step
        pipeline_model_parallel_comm_backend reuse_grad_buf_for_mxfp8_param_ag scatter_gather_tensors_in_pipeline
        sharp_enabled_group suggested_communication_unit_size torch_fsdp2_reshard_after_forward tp_comm_atomic_ag
        tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag
        tp_comm_overlap_cfg tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_split_rs use_contiguous_buffers_in_ddp use_contiguous_buffers_in_local_ddp use_custom_fsdp
        use_gloo_process_groups use_megatron_fsdp use_ring_exchange_p2p use_sharp use_torch_fsdp2 variable_seq_lengths
        wgrad_deferral_limit
    """,
    "parallelism": """
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards gtp_remat_opt_in_modules
        gtp_weight_remat_size hierarchical_context_parallel_sizes hybrid_context_parallel lazy_mpu_init local_rank
        max_seqlen_per_dp_cp_rank mtp_standalone num_distributed_optimizer_instances
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_model_parallel_split_rank
        sequence_parallel standalone_embedding_stage tensor_parallel_num_weight_shards transformer_pipeline_model_parallel_size
    """,
    "initialization and random numbers": """
        data_parallel_random_init embedding_init_method embedding_init_method_std init_method init_method_std
        init_method_xavier_uniform init_model_with_meta_device moe_upcycling_granularity moe_use_upcycling
        output_layer_init_method perform_initialization seed te_rng_tracker use_cpu_initialization use_te_rng_tracker
    """,
    "training alone: losses, dropout, optimizer, schedule, evaluation": """
        _is_global_batch_size_explicitly_specified accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps
        attention_dropout batch_size calculate_per_token_loss check_for_large_grads check_for_nan_in_loss
        check_for_nan_in_loss_and_grad check_for_spiky_loss check_weight_hash_across_dp_replicas_interval clip_grad
        consumed_train_bins decoupled_min_lr decrease_batch_size_if_needed do_test do_train do_valid dump_param_to_param_group_map
        dynamic_loss_scale end_weight_decay error_injection_rate error_injection_type eval_global_batch_size eval_interval
        eval_iters eval_micro_batch_size exp_avg_dtype exp_avg_sq_dtype export_freeze_mtp export_kd_cfg export_kd_finalize
        export_kd_teacher_ckpt_format export_kd_teacher_load export_kd_teacher_model_config finalize_model_grads_func
        freeze_all_layers freeze_base_for_mtp full_validation global_batch_size grad_reduce_in_bf16 grad_scale_func grad_sync_func
        head_lr_mult hidden_dropout hysteresis initial_loss_scale iteration iterations_to_skip lion_beta1 lion_beta2
        log_max_attention_logit logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha
        logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k
        logits_save_top_p logits_save_top_p_min_k loss_scale loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_steps
        lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples lr_warmup_steps lr_wsd_decay_iters
        lr_wsd_decay_samples lr_wsd_decay_style main_grads_dtype main_params_dtype manual_gc manual_gc_eval manual_gc_interval
        micro_batch_size min_loss_scale min_lr moe_aux_loss_coeff moe_enable_routing_replay moe_grad_scale_func
        moe_per_layer_logging moe_router_bias_update_rate moe_z_loss_coeff mtp_detach_heads mtp_grad_scale_func mtp_hsm
        mtp_loss_scaling_factor multiple_validation_sets muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec
        muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode
        muon_use_nesterov muon_use_syrk no_sync_func num_floating_point_operations_so_far optimizer optimizer_cpu_offload
        optimizer_offload_fraction override_lr_scheduler override_opt_param_scheduler param_sync_func pin_cpu_grads pin_cpu_params
        qad_train_target qk_clip qk_clip_alpha qk_clip_threshold rampup_batch_size rerun_mode result_rejected_tracker_filename
        sgd_momentum skip_train skipped_train_samples start_eval_at_iter start_weight_decay step_batch_size_schedule
        teacher_model_config test_mode timers to_test train_iters train_samples train_sync_interval use_checkpoint_lr_scheduler
        use_checkpoint_opt_param_scheduler use_distributed_optimizer use_layer_wise_distributed_optimizer
        use_layer_wise_param_layout use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload validation_set_names warmup
        wd_incr_steps weight_decay weight_decay_incr_style wsd_decay_steps
    """,
    "serving, and reinforcement learning": """
        batch_invariant_backend batch_invariant_mode cache_mla_latents decode_only_cuda_graphs disable_chunked_prefill
        enable_chunked_prefill flash_decode grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_default_temperature grpo_default_top_p
        grpo_entropy_term_weight grpo_filter_groups_with_same_reward grpo_group_size grpo_iterations grpo_kl_beta
        grpo_prompts_per_step grpo_samples_per_iteration inference_batch_times_seqlen_threshold inference_coordinator_port
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens inference_cuda_graph_scope
        inference_disable_ep_consensus inference_disable_triton_nvls_kernels inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_guaranteed_fraction inference_dynamic_batching_buffer_overflow_factor
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_chunk_size
        inference_dynamic_batching_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_requests_override
        inference_dynamic_batching_max_tokens inference_dynamic_batching_max_tokens_override
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_mamba_gb inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_sampling_backend inference_dynamic_batching_track_generated_token_events
        inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_unified_memory_level
        inference_fuse_tp_communication inference_grouped_gemm_backend inference_logging_step_interval inference_max_batch_size
        inference_max_requests inference_max_seq_length inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed inference_shards
        inference_text_gen_server_logging inference_use_synchronous_zmq_collectives inference_wandb_logging langrl_env_config
        langrl_external_server langrl_inference_server_conversation_template langrl_inference_server_type max_tokens_to_oom
        mlp_chunks_for_prefill mlp_chunks_for_training moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill
        num_speculative_tokens offset_sampling_seed_by_dp_rank perform_rl_step refit_method rl_calculate_intra_group_similarity
        rl_consumption_granularity rl_default_temperature rl_default_top_k rl_default_top_p rl_durable_rollout_bank
        rl_enforce_generation_order rl_generation_batch_size rl_generation_lag rl_importance_sampling_truncation_coef
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size rl_inference_logprobs_is_correction
        rl_inference_model_unified_memory_level rl_inference_parsers rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode rl_max_inflight_requests
        rl_num_parallel_generation_batches rl_num_parallel_generations rl_offload_inference_model_weights_when_idle
        rl_offload_kv_cache_during_training rl_offload_optimizer_during_inference rl_parallel_generation_tasks rl_partial_rollouts
        rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval rl_remove_kv_cache_during_training
        rl_reset_cuda_graphs rl_rollout_bank_dir rl_rollout_bank_max_bytes rl_sequence_packing_algo rl_sequence_packing_bin_size
        rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token rl_submission_granularity rl_training_cuda_graphs
        rl_use_sequence_packing rl_verify_model_weights_swap symmetric_ar_type use_inference_optimized_layers
        use_legacy_static_engine
    """,
    "data and tokenizers": """
        allow_ambiguous_pad_tokens chat_template create_attention_mask_in_dataloader data_args_path data_cache_path data_cache_size
        data_impl data_path dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_inter_document_masking dataloader_type
        decoder_seq_length disable_msc_deprecated enable_msc encoder_seq_length eod_mask_loss fim_data fim_eod_token
        fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate
        fim_suffix_token finetune_data_files finetune_data_split finetune_hf_dataset image_encoder legacy_tokenizer mask_prob
        metadata_path mid_level_dataset_surplus mmap_bin_files mmap_warmup mock_data null_tokenizer_pad_id
        num_dataset_builder_threads num_workers object_storage_cache_path pad_vocab_size padded_vocab_size
        per_dataset_sequences_path per_split_data_args_path phase_transition_iterations renormalize_blend_weights
        reset_attention_mask reset_position_ids s3_cache_path sample_rate seq_length sft sft_tokenizer_prompt_format
        short_seq_prob special_tokens split test_data_path tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
        tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast tokenizer_hf_use_fast
        tokenizer_metadata tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy
        tokenizer_special_tokens train_data_path trust_remote_code use_gigatoken valid_data_path vocab_extra_ids
    """,
    "how checkpoints are saved and loaded": """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_save async_strategy auto_detect_ckpt_format
        ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
        ckpt_drop_redundant_extra_state ckpt_format ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save
        ckpt_fully_parallel_save_deprecated ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity
        ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path ckpt_step dist_ckpt_format dist_ckpt_format_deprecated
        dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers
        distrib_optim_fully_reshardable_mem_efficient exit_on_missing_checkpoint export_default_te_spec
        export_force_local_attention export_legacy_megatron export_model_type export_te_mcore_model finetune fully_parallel_load
        fully_parallel_save hetereogenous_dist_checkpoint load load_main_params_from_ckpt load_model_opt_format load_optim
        load_rng most_recent_k no_load_optim no_load_rng no_save_optim no_save_rng non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval
        override_ckpt_iteration pretrained_checkpoint replication replication_factor replication_jump save
        save_activations_interval save_config_filepath save_dgrads_interval save_interval save_optim save_params_interval
        save_retain_interval save_rng save_tokenizer_assets save_tokens_per_expert_interval save_wgrads_interval
        stream_ckpt_dequant strict_fsdp_dtensor_load use_checkpoint_args use_dist_ckpt use_dist_ckpt_deprecated
        use_mp_args_from_checkpoint_args use_persistent_ckpt_worker use_tokenizer_model_from_checkpoint_args verify_integrity
    """,
    "logging, profiling, and the job itself": """
        adlr_autoresume adlr_autoresume_interval app_tag_run_name app_tag_run_version barrier_with_L1_time basemodel_type
        calc_ft_timeouts config_logger_dir disable_straggler_on_startup enable_experimental enable_ft_package enable_one_logger
        exit_duration_in_mins exit_interval exit_signal exit_signal_handler exit_signal_handler_for_dataloader
        exit_signal_handler_for_training filter_warnings ft_num_warmup_iters gpu_sniff_test_interval inprocess_active_world_size
        inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache inprocess_granularity
        inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait
        inprocess_max_iterations inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_restart inprocess_soft_timeout inprocess_termination_grace_time
        log_batch_size_to_tensorboard log_device_memory_used log_energy log_interval log_l2_norm_grad_to_tensorboard
        log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_memory_interval log_memory_to_tensorboard
        log_num_zeros_in_grad log_params_norm log_progress log_runtime_to_tensorboard log_straggler log_throughput
        log_throughput_to_tensorboard log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
        logging_level memory_keys memory_profile memory_profile_path memory_snapshot_path modules_to_filter
        moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
        moe_routing_trace_max_training_iters moe_routing_trace_path nvtx_ranges one_logger_async one_logger_entity
        one_logger_project one_logger_run_name otel_enabled otel_service_name otel_span_groups profile profile_ranks
        profile_step_end profile_step_start pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
        pytorch_profiler_collect_shapes record_memory_history record_shapes run_workload_inspector_server runtime_time_unit
        set_level_for_all_loggers straggler_ctrlr_port straggler_minmax_count tensorboard_dir tensorboard_log_interval
        tensorboard_queue_size throughput_window_size timing_log_level timing_log_option use_nsys_profiler use_pytorch_profiler
        wandb_entity wandb_exp_name wandb_project wandb_save_dir yaml_cfg
    """,
    "of ms-swift: the kind of a head of scores, which the tensors show": """
        num_labels problem_type task_type
    """,
    "flags of megatron_lite, which mean the same as Megatron's": """
        bert_no_binary_head center_rewards_coefficient compile disable_bias_linear dpo dpo_beta dpo_label_smoothing dpo_loss
        distill_alpha distill_beta distill_on_policy distill_temperature dpo_reference_cache early_stopping_patience epochs
        embedding embedding_document_prompt embedding_negatives embedding_pooling embedding_query_prompt embedding_temperature
        teacher_image_encoder teacher_load
        beta delta epsilon epsilon_high grpo importance_sampling_level loss_type mask_truncated_completions max_completion_length
        num_generations num_iterations reward reward_modeling reward_weights sapo_temperature_neg sapo_temperature_pos
        scale_rewards simpo_gamma temperature use_bias_correction_kl
        finetune_data finetune_form finetune_loss finetune_turns fp32 fp8_format kto kto_beta kto_desirable_weight
        kto_reference_cache kto_undesirable_weight keep_best keep_last keep_last_batch lora_alpha
        lora_dora lora_dropout lora_load lora_modules_to_save lora_rank lora_rslora lora_targets lora_trainable_token_indices
        metrics_file no_bias_gelu_fusion
        guide no_check_for_nan_in_loss_and_grad no_fp8_wgrad no_gradient_accumulation_fusion no_manual_gc_eval objective peak_tflops plot
        resume retriever_negatives save_delta
        corpora retro_megatron_neighbors retro_no_final_norm
        show_sample task train_data valid_data valid_finetune_data
    """,
}

HARMLESS: Mapping[str, frozenset[str]] = {
    reason: frozenset(names.split()) for reason, names in _BY_REASON.items()
}
