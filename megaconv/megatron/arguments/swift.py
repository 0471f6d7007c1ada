"""The args of ms-swift's Megatron runs (Megatron-SWIFT), which name no sizes of the model.

    checkpoint-10/args.json, latest_checkpointed_iteration.txt
    checkpoint-10/iter_0000010/common.pt, .metadata, __0_0.distcp ...    Megatron core's `torch_dist`
    checkpoint-10/config.json, model.safetensors ...                     the same model as exported, with --save_safetensors

ms-swift makes Megatron's configuration of the Hugging Face one in memory (mcore_bridge.hf_to_mcore_config), and saves its own
arguments: those of the data, the template, the tuner and the trainer. Source: swift/megatron/ of ms-swift 4.6.0.
"""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megaconv.errors import UsageError
from megaconv.families.parts.keys import CONFIG_NAME

if TYPE_CHECKING:
    from megaconv.options import LoadOptions

_OF_RUN = """
    _teacher_use_disable_adapter _val_dataset_exists adapters add_non_thinking_prefix add_version advantage_estimator agent_template
    aligner_lr apply_dsa_kernel_fusion async_generate attn_impl bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type
    bnb_4bit_use_double_quant bridge_backend cached_dataset cached_val_dataset calculate_KL callbacks check_model ckpt_dir columns
    completion_length_limit_scope cosine_max_len cosine_max_len_value_correct cosine_max_len_value_wrong
    cosine_min_len_value_correct cosine_min_len_value_wrong cp_partition_mode create_checkpoint_symlink custom_dataset_info
    data_seed dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor dataset dataset_num_proc dataset_shuffle ddp_backend ddp_timeout decision_drop_instructions
    decision_shuffle_fields decision_state_as_text decision_subsample_options desirable_weight device_groups device_map
    disable_auto_column_mapping disable_ignore_empty_think download_mode dynamic_sample enable_channel_loss enable_dft_loss
    enable_npu_model_patch enable_thinking eval_steps exist_ok experts_impl f_divergence_type fipo_clip_high_only fipo_clip_range
    fipo_decay_rate fipo_safety_threshold freeze_aligner freeze_llm freeze_parameters freeze_parameters_ratio
    freeze_parameters_regex freeze_vit generation_batch_size gkd_logits_topk global_world_size greater_is_better group_by_length
    gym_env hub hub_token ignore_args_error interleave_prob is_binary_loss_scale is_multimodal
    kl_in_reward label_smoothing lazy_tokenize lmbda load_args load_data_args load_from_cache_file local_repo_path local_world_size
    log_completions log_entropy log_rollout_offpolicy_metrics logging_steps logprobs lora_bias lora_dtype manual_gc_steps max_length
    max_memory max_model_len max_new_tokens max_pixels max_resample_times max_shard_size max_turns mcore_adapter mcore_model
    mcore_ref_adapter mcore_ref_model megatron_model_meta merge_lora metric_for_best_model mlp_padding_free model model_author
    model_dir model_info model_meta model_name model_revision model_suffix modules_to_save move_model_batches mrl_dims
    mtp_decoder_input_detach multi_turn_scheduler muon_lr muon_min_lr nccl_comm_warmup norm_bbox num_beams num_generations_eval
    num_microbatches num_train_epochs off_policy_sequence_mask_delta offload_bridge offload_model offload_optimizer
    offload_teacher_model output_dir overlong_filter packing packing_length packing_num_proc packing_strategy padding_free
    padding_side per_device_generation_batch_size preserve_thinking ray_exp_name real_tau ref_adapters ref_model
    ref_model_mixup_alpha ref_model_sync_steps reference_free remove_unused_columns repetition_max_penalty repetition_n_grams
    repetition_penalty report_to response_prefix reward_funcs reward_model reward_model_plugin rlhf_type
    rollout_importance_sampling_mode rollout_importance_sampling_threshold router_replay_mode rpo_alpha save_missing_weights
    save_safetensors save_steps save_strategy save_total_limit seq_kd sequence_packing_scheduler sequence_parallel_size sft_alpha
    shuffle_buffer_size skip_megatron_init sleep_level soft_cache_length soft_max_length split_dataset_ratio steps_per_generation
    stop_words stopping_strategy stream streaming strict structured_outputs_regex swanlab_exp_name swanlab_project swift_version
    sync_ref_model system target_modules target_regex tau_neg tau_pos teacher_kl_coef teacher_megatron_model_meta teacher_model
    teacher_model_dir teacher_model_info teacher_model_meta teacher_model_revision teacher_model_server teacher_model_type
    teacher_tag_key template template_backend template_meta test_convert_dtype test_convert_precision to_hf to_mcore
    top_entropy_quantile top_k top_logprobs top_p torch_dtype train_dataloader_shuffle trainable_parameters
    trainable_parameters_regex truncation_strategy tuner_backend tuner_type undesirable_weight use_chat_template use_fused_mhc
    use_gym_env use_hf use_ray use_rslora use_swift_lora use_vllm val_dataset val_dataset_shuffle vit_attn_impl
    vit_gradient_checkpointing vit_gradient_checkpointing_kwargs vit_lr vllm_disable_cascade_attn vllm_enable_lora
    vllm_enable_prefix_caching vllm_enforce_eager vllm_engine_kwargs vllm_gpu_memory_utilization vllm_limit_mm_per_prompt
    vllm_max_model_len vllm_max_num_seqs vllm_mm_processor_cache_gb vllm_mode vllm_server_base_url vllm_server_group_port
    vllm_server_host vllm_server_pass_dataset vllm_server_port vllm_server_timeout vllm_tensor_parallel_size
    wandb_log_unique_prompts
"""
OF_RUN = frozenset(_OF_RUN.split())
"""Arguments that don't change the computation of a saved model."""

OF_MODEL = frozenset(
    (
        *("csa_dense_mode", "custom_register_path", "engram_tokenizer_map", "external_plugins", "fp4_format", "hqq_axis"),
        *("init_strategy", "language_model_only", "linear_decoupled_in_proj", "megatron_extra_kwargs", "model_kwargs"),
        *("mtp_shared_weights", "new_special_tokens", "quant_bits", "quant_method", "rope_scaling"),
    )
)  # fmt: skip
"""Arguments that change the model beyond its config.json. A warning names those that a run has."""


def is_of_swift(args: Namespace) -> bool:
    """True for the args of ms-swift."""
    return isinstance(vars(args).get("swift_version"), str)


def with_config_beside(
    version: Path, args: Namespace | None, options: "LoadOptions"
) -> "LoadOptions":
    """The options with the config.json that ms-swift exported beside the checkpoint, if the args name no sizes.

    version: the directory iter_*. Raises UsageError if there is no configuration.
    """
    if args is None or options.config is not None or not is_of_swift(args):
        return options
    if getattr(args, "num_attention_heads", None) is not None:
        return options
    if (version.parent / CONFIG_NAME).is_file():
        return replace(options, config=version.parent)
    raise UsageError(
        f"{version.parent}: the args of ms-swift don't describe the model ({vars(args).get('model')!r:.80}), and there is no "
        f"{CONFIG_NAME}; give --config with the model's Hugging Face directory",
        code="config-needed",
    )
