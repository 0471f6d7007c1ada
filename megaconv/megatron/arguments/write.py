"""Megatron's `args`: the namespace in every rank file, as it is written for our configuration (`read_args.py` reads it).

Complete enough that `--use-checkpoint-args` finds all that it asks for, under the names of old and new releases alike
(norm epsilon and zero-centered gamma were renamed). Source: megatron/training arguments.py and checkpointing.py of
Megatron-LM, core 0.4 to 0.19.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.encoder import encoder_arguments, split_rank_arguments
from megaconv.megatron.arguments.latent import latent_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, split_arguments
from megaconv.model.training import TrainingState

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's use_rope_scaling means besides the factor."""

YARN = {
    "factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
"""config.json's words -> those by which GPTModel of core 0.16 asks its configuration for them."""
YARN_TRUNCATE = "yarn_correction_range_round_to_int"

OPTIMIZATION = (
    "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "start_weight_decay", "end_weight_decay",
    "weight_decay_incr_style", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad", "lr_decay_style", "lr_decay_iters",
    "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "train_iters", "train_samples",
    "global_batch_size", "micro_batch_size", "seed", "loss_scale", "initial_loss_scale",
    "accumulate_allreduce_grads_in_fp32",
)  # fmt: skip
"""Arguments about optimization, which go from checkpoint to checkpoint with the optimizer's state."""


def to_arguments(
    config: ModelConfig,
    layout: Layout,
    training: TrainingState,
    *,
    transformer_impl: str,
    grouped_experts: bool,
    vocab_divisor: int,
    padded_vocab: int,
    allow_lossy: bool = False,
    legacy: bool = False,
) -> dict[str, Any]:
    """All arguments by name; dtypes as names. legacy: for the models before core.

    Raises NotExpressible for what Megatron has no words for.
    """
    if config.o_bias != config.mlp_bias or (config.o_bias and not config.qkv_bias):
        raise NotExpressible(
            "Megatron has biases on all linear layers, on q, k and v only, or on none; this model has another set"
        )
    return (
        _architecture(config)
        | encoder_arguments(config, transformer_impl, legacy=legacy)
        | latent_arguments(config)
        | _experts(config, grouped_experts)
        | _positions(config, allow_lossy, legacy=legacy)
        | _vocabulary(config, vocab_divisor, padded_vocab)
        | _parallelism(config, layout)
        | split_rank_arguments(layout, legacy=legacy)
        | _training(config, training, transformer_impl, legacy)
    )


def _architecture(config: ModelConfig) -> dict[str, Any]:
    grouped = config.kv_heads != config.heads
    return {
        "num_layers": config.layers,
        "encoder_num_layers": config.layers,
        "decoder_num_layers": None,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "group_query_attention": grouped,
        "num_query_groups": config.kv_heads if grouped else 1,
        "kv_channels": config.head_dim,
        "normalization": config.normalization,
        "norm_epsilon": config.norm_epsilon,
        "layernorm_epsilon": config.norm_epsilon,
        "apply_layernorm_1p": config.zero_centered_norm,
        "layernorm_zero_centered_gamma": config.zero_centered_norm,
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "softmax_type": "learnable" if config.sinks else "vanilla",
        "swiglu": config.gated and config.activation == "silu",
        "quick_geglu": config.gated and config.activation == "quick_gelu",
        "gated_linear_unit": config.gated,
        "glu_linear_offset": config.glu_offset,
        "activation_func_clamp_value": config.glu_limit,
        "squared_relu": False,
        "openai_gelu": False,
        # The fused kernel computes the approximation: in Megatron this flag is part of what the model is.
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "mtp_num_layers": config.mtp_layers or None,
        "bert_binary_head": False,
        "window_size": (config.sliding_window - 1, 0) if config.sliding_window else None,
        "window_attn_skip_freq": _window_pattern(config),
    }


def _experts(config: ModelConfig, grouped: bool) -> dict[str, Any]:
    if config.router_score == "sigmoid" and not config.renormalize:
        raise NotExpressible("Megatron's sigmoid router makes the experts' weights sum up to 1, this model's doesn't")
    if (config.router_groups or 1) > 1 and config.experts_per_token // (config.router_group_topk or 1) != 2:
        raise NotExpressible(
            "Megatron ranks a group by its experts_per_token // router_group_topk best experts, this model by its best 2: "
            f"{config.experts_per_token} experts of {config.router_group_topk} groups aren't 2 of each"
        )
    if not config.experts:
        return {"num_experts": None, "moe_grouped_gemm": False, "moe_use_legacy_grouped_gemm": False}
    with_experts = [int(config.has("moe", layer)) for layer in range(config.layers)]
    return {
        "num_experts": config.experts,
        "moe_ffn_hidden_size": config.moe_ffn,
        "moe_layer_freq": 1 if all(with_experts) else with_experts,
        "moe_grouped_gemm": grouped,
        "moe_use_legacy_grouped_gemm": False,
        "moe_router_topk": config.experts_per_token,
        "moe_router_score_function": config.router_score,
        "moe_router_pre_softmax": config.router_score == "softmax" and not config.renormalize,
        "moe_router_topk_scaling_factor": config.router_scale,
        "moe_router_enable_expert_bias": config.router_bias,
        "moe_router_num_groups": config.router_groups,
        "moe_router_group_topk": config.router_group_topk,
        "moe_shared_expert_intermediate_size": config.shared_ffn or None,
        "moe_shared_expert_gate": config.shared_gate,
        "moe_token_dispatcher_type": "alltoall",
        "moe_extended_tp": False,
    }


def _window_pattern(config: ModelConfig) -> list[int] | None:
    if config.sliding_window is None or config.windowed_layers is None:
        return None
    return [int(layer in config.windowed_layers) for layer in range(config.layers)]


def _positions(config: ModelConfig, allow_lossy: bool, *, legacy: bool) -> dict[str, Any]:
    theta = int(config.rope_theta) if float(config.rope_theta).is_integer() else config.rope_theta
    return {
        "max_position_embeddings": config.max_positions,
        "seq_length": config.max_positions,
        "encoder_seq_length": config.max_positions,
        "position_embedding_type": {"learned": "learned_absolute"}.get(config.positions, config.positions),
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": theta,
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    } | ({} if config.kv_rank else _scaling(config, allow_lossy, legacy=legacy))


def _scaling(config: ModelConfig, allow_lossy: bool, *, legacy: bool) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    kind = scaling["rope_type"]
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": scaling["factor"]}
    if kind == "llama3" and all(float(scaling[name]) == value for name, value in LLAMA3_SCALING.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    if has_yarn(config) and not legacy:
        return _yarn(scaling, config.max_positions)
    if allow_lossy:
        return {}
    raise NotExpressible(
        f"rope scaling {dict(scaling)} has no equivalent in Megatron core; with --allow-lossy rope_scaling "
        "the output is written without it (its hf/config.json keeps it, so that converting back loses nothing)"
    )


def has_yarn(config: ModelConfig) -> bool:
    """Whether GPTModel's own yarn, which is that of whole heads, scales this model's positions."""
    scaling = config.rope_scaling or {}
    others = {name for name, value in scaling.items() if value is not None} - {"rope_type", "truncate", *YARN}
    return scaling.get("rope_type") == "yarn" and not others and config.rotary_percent == 1.0 and not config.kv_rank


def _yarn(scaling: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """What transformers takes a missing word for is said. Both take one mscale without the other for none."""
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": max_positions}
    said = usual | {name: value for name, value in scaling.items() if value is not None}
    if not (said.get("mscale") and said.get("mscale_all_dim")):
        said |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    words = {argument: said[name] for name, argument in YARN.items()}
    return {"position_embedding_type": "yarn", **words, YARN_TRUNCATE: bool(said.get("truncate", True))}


def _vocabulary(config: ModelConfig, divisor: int, padded: int) -> dict[str, Any]:
    return {
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "make_vocab_size_divisible_by": divisor,
        "vocab_size": config.vocab,
        "padded_vocab_size": padded,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None,
        "vocab_file": None,
    }


def _parallelism(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    split = split_arguments(layout)
    if split["pipeline_model_parallel_layout"] is not None:
        split["pipeline_model_parallel_layout"] = (
            split["pipeline_model_parallel_layout"][:-1] + "m" * config.mtp_layers + "L"
        )
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if config.experts else layout.tp,
        "context_parallel_size": 1,
        "data_parallel_size": layout.ep,
        "world_size": layout.tp * layout.pp * layout.ep,
        "sequence_parallel": False,
        **split,
    }


def _training(config: ModelConfig, training: TrainingState, transformer_impl: str, legacy: bool) -> dict[str, Any]:
    return {
        "fp16": config.dtype == "float16",
        "bf16": config.dtype == "bfloat16",
        "params_dtype": config.dtype,
        "transformer_impl": transformer_impl,
        "use_legacy_models": legacy,
        "use_mcore_models": not legacy,
        "ckpt_format": "torch",
        "iteration": training.iteration or 0,
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
        "skipped_train_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
        "data_parallel_random_init": False,
    }
