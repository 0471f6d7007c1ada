"""The command line for Megatron's arguments: the flags that a run needs to start from a checkpoint.

Flags are those of Megatron-LM's pretrain_gpt.py; tests/megatron_flags.py reads them from its real parsers. Arguments
without a flag in any parser (yarn's numbers, caps on scores) are listed, so that the user can set them in code.
"""

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

_VALUES = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization norm_epsilon
    softmax_type glu_linear_offset activation_func_clamp_value window_size window_attn_skip_freq mtp_num_layers
    num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_score_function moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_shared_expert_intermediate_size moe_token_dispatcher_type moe_router_dtype
    max_position_embeddings seq_length position_embedding_type rotary_base rotary_percent no_rope_freq rope_scaling_factor
    rotary_seq_len_interpolation_factor
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale mscale_all_dim
    experimental_attention_variant linear_attention_freq linear_num_key_heads linear_key_head_dim linear_num_value_heads
    linear_value_head_dim linear_conv_kernel_dim dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim hybrid_override_pattern hybrid_layer_pattern moe_latent_size
    encoder_num_layers decoder_num_layers decoder_seq_length relative_attention_num_buckets relative_attention_max_distance
    tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage expert_model_parallel_size
    expert_tensor_parallel_size decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    pipeline_model_parallel_layout pipeline_model_parallel_split_rank encoder_pipeline_model_parallel_size
    encoder_tensor_model_parallel_size transformer_impl ckpt_format spec
    make_vocab_size_divisible_by tokenizer_type tokenizer_model vocab_size load attention_dropout hidden_dropout
    optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad lr_decay_style lr_decay_iters
    lr_warmup_iters train_iters global_batch_size micro_batch_size seed
"""
_SWITCHES = """
    group_query_attention apply_layernorm_1p add_qkv_bias qk_layernorm qk_l2_norm attention_output_gate swiglu quick_geglu squared_relu
    openai_gelu apply_residual_connection_post_layernorm moe_grouped_gemm moe_router_pre_softmax
    moe_router_enable_expert_bias moe_apply_probs_on_input moe_shared_expert_gate rotary_interleaved use_rope_scaling multi_latent_attention
    untie_embeddings_and_output_weights account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    is_hybrid_model fp16 bf16 use_legacy_models no_load_optim no_load_rng
"""
VALUES, SWITCHES = tuple(_VALUES.split()), tuple(_SWITCHES.split())
"""Arguments whose flag has their name: those with a value, and those that are a switch."""
OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bert_binary_head": "--bert-no-binary-head",
}
"""Arguments that are true unless this flag is given."""

_DEFAULTS: Mapping[str, object] = {
    "softmax_type": "vanilla", "glu_linear_offset": 0.0, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1, "rotary_percent": 1.0, "moe_router_score_function": "softmax", "spec": None,
}  # fmt: skip
"""Values that every release assumes for a missing flag. Older releases don't know all of these flags."""
_WHOLE = ("rotary_base", "rotary_seq_len_interpolation_factor")
"""Flags that accept only integers."""
_UNSETTABLE = (
    "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale",
    "yarn_mscale_all_dim", "yarn_correction_range_round_to_int", "softmax_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "hetereogenous_dist_checkpoint",
    "dsa_indexer_rope_interleaved", "dsa_indexer_k_norm_epsilon", "dsa_indexer_rotate_activation",
    "beta_fast", "beta_slow", "original_max_position_embeddings", "megaconv_qk_norm_width", "megaconv_unpredicted_tokens",
    "megaconv_renormalized_experts", "megaconv_bias_on_logits",
)  # fmt: skip
_USUAL = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


class CommandLine(NamedTuple):
    flags: tuple[tuple[str, ...], ...]
    """Flags, each with its values if it has any. --spec has two values."""
    unsettable: Mapping[str, Any]
    """Arguments without a flag, with the values that the model needs."""

    @property
    def words(self) -> list[str]:
        return [word for flag in self.flags for word in flag]

    def lines(self) -> Iterator[str]:
        """One flag per line, quoted for a shell."""
        return (" ".join(quote(word) for word in flag) for flag in self.flags)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def known_flags() -> set[str]:
    """All flags that may be written."""
    return {flag_of(name) for name in (*VALUES, *SWITCHES)} | set(OFF.values())


def command_line(arguments: Mapping[str, Any]) -> CommandLine:
    """The command line for arguments from `write.py`, and for any others in VALUES and SWITCHES."""
    given = _that_matter(arguments)
    flags: list[tuple[str, ...]] = []
    unsettable = {
        name: given[name]
        for name in _UNSETTABLE
        if given.get(name, _USUAL.get(name)) != _USUAL.get(name)
    }
    for name in VALUES:
        value = given.get(name)
        if value is None or value == _DEFAULTS.get(name):
            continue
        if not _fits(name, value):
            unsettable[name] = value
            continue
        flags.append(
            (
                flag_of(name),
                *(value if name == "spec" and isinstance(value, list) else [_text(name, value)]),
            )
        )
    flags += [(flag_of(name),) for name in SWITCHES if given.get(name)]
    flags += [(flag,) for name, flag in OFF.items() if given.get(name) is False]
    return CommandLine(tuple(flags), unsettable)


def _that_matter(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that others make irrelevant."""
    given = dict(arguments)
    if not given.get("group_query_attention"):
        given["num_query_groups"] = None
    if given.get("swiglu") or given.get("quick_geglu") or given.get("squared_relu"):
        given["bias_gelu_fusion"] = None
    if not given.get("use_rope_scaling") and not isinstance(
        given.get("rotary_base"), (tuple, list)
    ):
        given["rope_scaling_factor"] = None
    if given.get("position_embedding_type") == "learned_absolute":
        given |= dict.fromkeys(("rotary_base", "rotary_percent"))
    if given.get("decoder_num_layers") is None:
        given["encoder_num_layers"] = None
    else:  # Megatron-LM accepts only one of them
        given["num_layers"] = None
    if not given.get("num_experts"):
        given["expert_tensor_parallel_size"] = None
    if not given.get("bert_binary_head") and not given.get("is_bert"):
        given["bert_binary_head"] = None
    return given


def _fits(name: str, value: object) -> bool:
    """True if a flag can express the value. Only the newest release has a flag for yarn."""
    if isinstance(value, (tuple, list)) and name == "rotary_base":
        return False
    if name in _WHOLE:
        return float(str(value)).is_integer()
    return (name, value) != ("position_embedding_type", "yarn")


def _text(name: str, value: object) -> str:
    if name == "window_size" and isinstance(value, Sequence):
        return ",".join(map(str, value))
    if name in _WHOLE:
        return str(int(float(str(value))))
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
