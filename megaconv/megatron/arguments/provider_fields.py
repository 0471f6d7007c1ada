"""A model as the fields of a Megatron-Bridge provider, from which Bridge builds it: the inverse of provider.py.

    _target_: megatron.bridge.models.gpt_provider.GPTModelProvider          GPTModel; with latent attention another
    num_layers: 32
    activation_func: {_target_: torch.nn.functional.silu, _call_: false}

Bridge drops a field that the class doesn't have, with only a warning. Therefore only names are written that all
releases since 0.3 have, and those of yarn, without which Bridge 0.3 can't build a model with yarn. Models whose layers
need special providers (OLMoE, hybrids ...) are refused. Gemma 3 with images has further fields (gemma3_provider.py).
Source: gpt_provider.py, mla_provider.py and instantiate_utils.py of Megatron-Bridge 0.3.1 to 0.6.2, TransformerConfig of
megatron-core 0.16 to 0.19.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.gemma3_provider import GEMMA3, gemma3_fields
from megaconv.megatron.arguments.linear import LINEAR_SIZES
from megaconv.megatron.arguments.provider import RENAMED, provider_arguments
from megaconv.megatron.arguments.read import from_arguments, tensor_fields
from megaconv.megatron.arguments.rope import YARN, YARN_TRUNCATE, has_yarn
from megaconv.megatron.arguments.whole import without_images
from megaconv.megatron.arguments.whole_provider import provider_of, whole_fields
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.layout import Layout
from megaconv.model.meaning import require_kept

_MODELS = "megatron.bridge.models"
_GPT = f"{_MODELS}.gpt_provider.GPTModelProvider"
_LATENT = f"{_MODELS}.mla_provider.MLAModelProvider"
_LAYERS = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"

_SAME = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "normalization",
    ),
    *(
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
    ),
    *("qk_l2_norm", "attention_output_gate", "softmax_type", "softmax_scale", "glu_linear_offset"),
    *(
        "activation_func_clamp_value",
        "gated_linear_unit",
        "apply_query_key_layer_scaling",
        "attention_dropout",
    ),
    *(
        "hidden_dropout",
        "window_size",
        "window_attn_skip_freq",
        "position_embedding_type",
        "rotary_base",
    ),
    *(
        "rotary_percent",
        "rotary_interleaved",
        "no_rope_freq",
        "rope_scaling_factor",
        "mtp_num_layers",
    ),
    *(
        "multi_latent_attention",
        "transformer_impl",
        "fp16",
        "bf16",
        "vocab_size",
        "make_vocab_size_divisible_by",
    ),
)
_OF_EXPERTS = (
    *(
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_grouped_gemm",
        "moe_router_topk",
        "moe_router_score_function",
    ),
    *(
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_apply_probs_on_input",
        "moe_router_dtype",
    ),
    *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_token_dispatcher_type"),
)
_OF_LATENT = (
    *(
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rope_type",
        "mscale",
    ),
    *(
        "rotary_scaling_factor",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
    ),
)
_OF_LINEAR = (
    "experimental_attention_variant",
    "linear_attention_freq",
    *LINEAR_SIZES,
    "hetereogenous_dist_checkpoint",
)
_PARALLEL = (
    *(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
    ),
    *(
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
    ),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
)
"""Fields with the same names in Megatron-LM's arguments and in providers."""

NOT_IN_CORE = {
    "output_norm": "norms after sublayers",
    "sandwich_norm": "norms after sublayers",
    "wide_qk_norm": "norms of q and k over all heads",
    "capped_scores": "capped attention scores",
    "capped_logits": "capped logits",
    "two_ropes": "a second base of rope",
}
"""Feature of a model -> the part that Megatron core lacks for it."""
_NOT_BUILT = {
    **NOT_IN_CORE,
    "post_norm": "norms after sublayers",
    "encoder": "an encoder",
    "mamba_layers": "Mamba layers",
    "convolution_layers": "short convolutions",
    "linear_layers": "linear attention",
    "indexer": "sparse attention",
    "scaled_embedding": "a scaled embedding",
}
"""Feature of a model -> the part that GPTModelProvider's layers lack for it."""


def provider_fields(config: ModelConfig, layout: Layout, args: Namespace) -> dict[str, Any]:
    """The `model:` section of a run_config.yaml as plain values. args: the arguments that are written for Megatron-LM.

    Raises NotExpressible, which names the feature, for a model that Bridge's general providers can't build, and for a
    multimodal model of another kind than PROVIDERS has.
    """
    of_whole = whole_fields(config.whole, args) if config.whole else {}
    return _language_model(config, layout, without_images(args)) | of_whole


def _language_model(config: ModelConfig, layout: Layout, args: Namespace) -> dict[str, Any]:
    """The fields of a model without encoders, or of the language model inside. Raises NotExpressible."""
    is_gemma3 = config.whole is not None and config.family == GEMMA3
    built = provider_of(config.whole).builds if config.whole else ()
    lacking = [
        what for feature, what in _NOT_BUILT.items() if config.has(feature) and feature not in built
    ]
    if lacking:
        raise NotExpressible(
            f"the model has {', '.join(lacking)}: Megatron-Bridge builds such models by other providers, which are not written"
        )
    given, latent = vars(args), bool(config.latent.kv_rank)
    names = [
        *_SAME,
        *_PARALLEL,
        *(_OF_LATENT if latent else ()),
        *(_OF_EXPERTS if config.experts.count else ()),
        *(_OF_LINEAR if config.has("linear_layers") else ()),
    ]
    names += (*YARN.values(), YARN_TRUNCATE) if has_yarn(config) else ()
    fields = {name: given[name] for name in names if name in given}
    fields |= {name: given[argument] for name, argument in RENAMED.items() if argument in given}
    fields |= {
        "_target_": _LATENT if latent else _GPT,
        "transformer_layer_spec": _layers(args),
        "num_moe_experts": config.experts.count or None,
        "num_query_groups": config.attention.kv_heads,
        "mtp_num_layers": config.mtp_layers or None,
        "share_embeddings_and_output_weights": config.tie_embeddings,
        "should_pad_vocab": True,
        "params_dtype": _named(f"torch.{config.dtype}"),
        "pipeline_dtype": _named(f"torch.{config.dtype}"),
        **_activation(config),
        **(gemma3_fields(config, args) if is_gemma3 else {}),
    }
    written = {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }
    _require_kept(config, written)
    return written


def _named(target: str) -> dict[str, Any]:
    """The YAML value for a function or class itself, by its dotted name."""
    return {"_target_": target, "_call_": False}


def _layers(args: Namespace) -> dict[str, Any]:
    """The function with which core specifies the layers of any GPTModel."""
    l2_norm = {"qk_l2_norm": True} if args.qk_l2_norm else {}
    engine = args.transformer_impl == "transformer_engine"
    return {
        "_target_": _LAYERS,
        "_partial_": True,
        "_args_": [],
        "use_transformer_engine": engine,
        **l2_norm,
    }


_ACTIVATIONS = {
    ("silu", True): "torch.nn.functional.silu",
    ("quick_gelu", True): "megatron.core.fusions.fused_bias_geglu.quick_gelu",
    ("relu2", False): "megatron.core.activations.squared_relu",
    ("gelu_tanh", True): "megatron.core.activations.fast_gelu",
    ("gelu", False): "torch.nn.functional.gelu",
    ("gelu_tanh", False): "megatron.core.activations.fast_gelu",
}
"""(activation, whether it is gated) -> the function.

Bias fusion stays off, because it would replace the exact gelu by the approximate one.
"""


def _activation(config: ModelConfig) -> dict[str, Any]:
    kind = (config.mlp.activation, config.mlp.gated)
    if kind not in _ACTIVATIONS:
        raise NotExpressible(
            f"an MLP with {kind[0]}{' and a gate' * kind[1]}: no function of Megatron core's computes it"
        )
    return {
        "activation_func": _named(_ACTIVATIONS[kind]),
        "bias_activation_fusion": kind == ("silu", True),
    }


def _require_kept(config: ModelConfig, fields: Mapping[str, Any]) -> None:
    """Raises NotExpressible, which names the field, if Bridge would build a different model from these fields."""
    args = provider_arguments(fields, "run_config.yaml: model", complete=True)
    back = from_arguments(args, tensor_fields(config), family=config.family)
    require_kept(config, back, "Megatron-Bridge's providers", but=NOT_COMPUTED)
