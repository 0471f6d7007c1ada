"""Megatron's `args`: the namespace in every rank file, from and to our configuration.

Written so that `--use-checkpoint-args` finds all that it asks for, under the names of old and new releases alike
(norm epsilon and zero-centered gamma were renamed), and read under any of these names. Source: megatron/training
arguments.py and checkpointing.py of Megatron-LM, core 0.4 to 0.19.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.config import ModelConfig
from megaconv.errors import CorruptCheckpoint, LayoutError, NotExpressible, UnknownFamily
from megaconv.layout import LayerSplit, Layout, split_arguments, split_layers
from megaconv.megatron.encoder_args import POST_NORM, encoder_arguments, read_encoder
from megaconv.megatron.latent_args import latent_arguments, read_latent
from megaconv.training import TrainingState

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's use_rope_scaling means besides the factor."""

OPTIMIZATION = (
    "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "start_weight_decay", "end_weight_decay",
    "weight_decay_incr_style", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "lr_decay_style", "lr_decay_iters",
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
        | _positions(config, allow_lossy)
        | _vocabulary(config, vocab_divisor, padded_vocab)
        | _parallelism(config, layout)
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
        "swiglu": config.gated and config.activation == "silu",
        "gated_linear_unit": config.gated,
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


def _positions(config: ModelConfig, allow_lossy: bool) -> dict[str, Any]:
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
    } | ({} if config.kv_rank else _scaling(config.rope_scaling, allow_lossy))


def _scaling(scaling: Mapping[str, Any] | None, allow_lossy: bool) -> dict[str, Any]:
    if scaling is None:
        return {}
    kind = scaling["rope_type"]
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": scaling["factor"]}
    if kind == "llama3" and all(float(scaling[name]) == value for name, value in LLAMA3_SCALING.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    if allow_lossy:
        return {}
    raise NotExpressible(
        f"rope scaling {dict(scaling)} has no equivalent in Megatron core; with --allow-lossy rope_scaling "
        "the output is written without it (its hf/config.json keeps it, so that converting back loses nothing)"
    )


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


def from_arguments(args: Namespace, found: Mapping[str, Any], *, legacy: bool = False) -> ModelConfig:
    """The configuration that args describe.

    found: what the tensors say, as fields of ModelConfig; it wins over args, which some tools write wrongly.
    legacy: whether they are of one of the models before core.
    Raises CorruptCheckpoint where args lack something that tensors can't tell, UnknownFamily for what isn't Llama-like.
    """
    _require_known(args, post_norm=legacy and "head_activation" in found)
    heads = _need(args, "num_attention_heads")
    grouped = getattr(args, "group_query_attention", False)
    window, pattern = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": _need(args, "num_query_groups") if grouped else heads,
        "head_dim": getattr(args, "kv_channels", None) or _need(args, "hidden_size") // heads,
        "max_positions": _need(args, "max_position_embeddings"),
        "positions": getattr(args, "position_embedding_type", "rope").removesuffix("_absolute"),
        "normalization": getattr(args, "normalization", "RMSNorm"),
        "activation": _read_activation(args, found["gated"]),
        "norm_epsilon": _first(args, "norm_epsilon", "layernorm_epsilon", default=1e-5),
        "rope_theta": float(getattr(args, "rotary_base", 10000)),
        "rope_scaling": _read_scaling(args),
        "rotary_percent": float(getattr(args, "rotary_percent", 1.0)),
        "sliding_window": window[0] + 1 if window and window[0] >= 0 else None,
    }
    if found.get("experts"):
        fields |= _read_experts(args, found["layers"])
    if fields["sliding_window"] and pattern is not None:
        layers = range(found["layers"])
        windowed = [
            layer for layer in layers if (pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern)
        ]
        fields["windowed_layers"] = tuple(windowed) if len(windowed) < len(layers) else None
    fields |= found
    if fields.get("encoder_layers") or fields.get("head_activation"):
        return ModelConfig(**fields | read_encoder(args, fields, legacy=legacy))
    fields |= read_latent(args)
    spellings = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
    fields["zero_centered_norm"] = any(getattr(args, name, False) for name in spellings)
    family = _family(fields)
    if family == "gemma":
        fields["embedding_scale"] = fields["hidden"] ** 0.5
    if family != "glm4_moe" and fields["rotary_percent"] != 1.0:
        raise UnknownFamily(
            f"the checkpoint's rotary_percent is {fields['rotary_percent']}, which no family has that it could be of"
        )
    return ModelConfig(family=family, **fields)


def _read_experts(args: Namespace, layers: int) -> dict[str, Any]:
    score = getattr(args, "moe_router_score_function", "softmax")
    return {
        "experts_per_token": _need(args, "moe_router_topk"),
        "moe_ffn": getattr(args, "moe_ffn_hidden_size", None) or _need(args, "ffn_hidden_size"),
        "shared_ffn": getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        "router_score": score,
        "renormalize": score != "softmax" or not getattr(args, "moe_router_pre_softmax", False),
        "router_scale": getattr(args, "moe_router_topk_scaling_factor", None),
        "router_groups": getattr(args, "moe_router_num_groups", None),
        "router_group_topk": getattr(args, "moe_router_group_topk", None),
    }


def _family(fields: Mapping[str, Any]) -> str:
    llama_like = (
        fields["positions"] == "rope" and fields["normalization"] == "RMSNorm" and fields["activation"] == "silu"
    )
    if fields["zero_centered_norm"]:
        return _family_of_zero_centered(fields)
    if fields.get("kv_rank"):
        return _family_of_latent(fields)
    if fields.get("experts") and llama_like:
        return _family_of_experts(fields)
    if fields["positions"] == "learned" and fields["normalization"] == "LayerNorm" and not fields["gated"]:
        return "gpt2"
    if not llama_like:
        what = ", ".join(f"{name} {fields[name]}" for name in ("positions", "normalization", "gated", "activation"))
        raise UnknownFamily(f"the checkpoint is of no model family that we know ({what})")
    if fields.get("qk_norm"):
        return "qwen3"
    if fields.get("qkv_bias") and not fields.get("o_bias"):
        return "qwen2"
    return "mistral" if fields.get("sliding_window") and not fields.get("windowed_layers") else "llama"


_GEMMA = {"positions": "rope", "normalization": "RMSNorm", "activation": "gelu_tanh", "gated": True}


def _family_of_zero_centered(fields: Mapping[str, Any]) -> str:
    differs = [name for name, value in _GEMMA.items() if fields.get(name) != value]
    differs += [name for name in ("experts", "qk_norm", "sliding_window", "kv_rank") if fields.get(name)]
    if differs:
        raise UnknownFamily(
            f"the checkpoint's norms are zero-centered, as only Gemma's are, whose {differs[0]} it hasn't; no family that we know fits"
        )
    return "gemma"


def _family_of_latent(fields: Mapping[str, Any]) -> str:
    routing = (fields.get("router_score"), bool(fields.get("router_bias")), fields.get("renormalize"))
    known = {("sigmoid", True, True): "deepseek_v3", ("softmax", False, False): "deepseek_v2"}
    if routing not in known:
        raise UnknownFamily(
            "the checkpoint has latent attention, but not the experts of DeepSeek-V2 (softmax before the choice) or V3 (sigmoid, bias)"
        )
    return known[routing]


def _family_of_experts(fields: Mapping[str, Any]) -> str:
    if fields.get("router_score") == "sigmoid":
        return "glm4_moe"
    if fields.get("shared_ffn"):
        return "qwen2_moe"
    return "qwen3_moe" if fields.get("qk_norm") else "mixtral"


def _read_activation(args: Namespace, gated: bool) -> str:
    if gated and getattr(args, "swiglu", True):
        return "silu"
    return "gelu_tanh" if getattr(args, "bias_gelu_fusion", False) or getattr(args, "openai_gelu", False) else "gelu"


def _require_known(args: Namespace, *, post_norm: bool) -> None:
    known: dict[str, tuple[Any, ...]] = {
        "position_embedding_type": ("rope", "learned_absolute", "relative"),
        "normalization": ("RMSNorm", "LayerNorm"),
        "squared_relu": (False,),
        "rotary_interleaved": (False,),
        POST_NORM: (False, True) if post_norm else (False,),
    }
    for name, values in known.items():
        actual = getattr(args, name, values[0])
        if actual not in values:
            raise UnknownFamily(
                f"the checkpoint's {name} is {actual!r}; the model families that we know have {' or '.join(map(repr, values))}"
            )


def _read_scaling(args: Namespace) -> dict[str, Any] | None:
    if getattr(args, "use_rope_scaling", False):
        return {"rope_type": "llama3", "factor": float(getattr(args, "rope_scaling_factor", 8.0)), **LLAMA3_SCALING}
    factor = getattr(args, "rotary_seq_len_interpolation_factor", None)
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _need(args: Namespace, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise CorruptCheckpoint(
            f"the checkpoint's args don't say {name}; give --config with the Hugging Face directory of the model"
        )
    return value


def _first(args: Namespace, *names: str, default: Any) -> Any:
    return next((value for name in names if (value := getattr(args, name, None)) is not None), default)


def read_layout(args: Namespace, config: ModelConfig) -> Layout:
    """The layout that args tell; a single rank where they tell none that the model's layers fit."""

    def size(name: str) -> int | None:
        value = getattr(args, name, None)
        return value if type(value) is int and value > 0 else None

    pattern = getattr(args, "pipeline_model_parallel_layout", None)
    split = LayerSplit(
        first=size("decoder_first_pipeline_num_layers"),
        last=size("decoder_last_pipeline_num_layers"),
        account_for_embedding=getattr(args, "account_for_embedding_in_pipeline_split", False) is True,
        account_for_loss=getattr(args, "account_for_loss_in_pipeline_split", False) is True,
        pattern=pattern if isinstance(pattern, str) else None,
    )
    tp, pp = size("tensor_model_parallel_size") or 1, size("pipeline_model_parallel_size") or 1
    vpp = size("virtual_pipeline_model_parallel_size") or 1
    try:
        stages = split_layers(config.layers, pp, vpp, split)
    except LayoutError:
        pp, vpp, stages = 1, 1, (config.layers,)
    if not config.experts:
        return Layout(tp, pp, vpp, stage_layers=stages)
    return Layout(
        tp, pp, vpp, size("expert_model_parallel_size") or 1, size("expert_tensor_parallel_size") or tp, stages
    )  # fmt: skip


def true_vocab(args: Namespace, padded: int, tp: int) -> int | None:
    """The vocabulary size that args tell, None when they don't tell one that can be true."""
    vocab = getattr(args, "vocab_size", None)
    if not isinstance(vocab, int):
        return None
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        vocab += 1  # it adds an end-of-document token
    divisor = getattr(args, "make_vocab_size_divisible_by", None) or 128
    return vocab if 0 <= padded - vocab < divisor * tp else None
