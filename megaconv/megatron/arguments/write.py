"""Writes Megatron's `args`, the namespace in every rank file, from a configuration (`read.py` reads it).

`--use-checkpoint-args` finds every argument that it asks for, under the names of old and new releases (norm epsilon and
zero-centered gamma were renamed). Source: megatron/training arguments.py and checkpointing.py of Megatron-LM, core 0.4
to 0.19.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families.parts.dropouts import dropouts_of
from megaconv.megatron.arguments.beyond_core import beyond_core_arguments
from megaconv.megatron.arguments.encoder import encoder_arguments, split_rank_arguments
from megaconv.megatron.arguments.expressible import (
    UNKNOWN_POSITIONS,
    require_names,
    require_representable,
)
from megaconv.megatron.arguments.latent import latent_arguments
from megaconv.megatron.arguments.linear import linear_arguments
from megaconv.megatron.arguments.mamba import mamba_arguments
from megaconv.megatron.arguments.null_tokenizer import adds_a_token
from megaconv.megatron.arguments.read import from_arguments, read_layout, tensor_fields
from megaconv.megatron.arguments.retrieval import retrieval_arguments
from megaconv.megatron.arguments.rope import write_scaling
from megaconv.megatron.arguments.router import own_router_arguments
from megaconv.megatron.arguments.run_arguments import LAYOUT, of_run, that_compute
from megaconv.megatron.arguments.sparse import sparse_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.fields import FIELDS, NOT_COMPUTED
from megaconv.model.layout import Layout, split_arguments
from megaconv.model.meaning import lost_fields, require_kept
from megaconv.model.training import TrainingState

LEFT_OUT = "megaconv_left_out"
"""The argument that lists the configuration's fields that --allow-lossy left out.

config.json still has these fields.
"""


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
    beside_config: bool = False,
    legacy: bool = False,
) -> dict[str, Any]:
    """All arguments by name; dtypes are names. legacy: True for a model from before Megatron core.

    beside_config: True if a config.json beside the checkpoint has all fields, as beside a trainer's own checkpoint. The
    arguments then list the fields that they can't represent.

    The arguments of the run that saved the source (training.arguments) stay unchanged, unless the output decides them
    (`run_arguments.py`). Raises NotExpressible for a model that Megatron doesn't support.
    """
    if not beside_config:
        require_names(config)
    require_representable(config, legacy=legacy, beside_config=beside_config)
    settings = _settings(config, training)
    written = (
        _architecture(config)
        | encoder_arguments(config, transformer_impl, legacy=legacy)
        | latent_arguments(config)
        | linear_arguments(config)
        | sparse_arguments(config)
        | retrieval_arguments(config, legacy=legacy)
        | _experts(config, grouped_experts)
        | _positions(config, allow_lossy or beside_config, legacy=legacy)
        | beyond_core_arguments(config, legacy=legacy)
        | _vocabulary(config, training, vocab_divisor, padded_vocab)
        | _parallelism(config, layout)
        | mamba_arguments(config, layout, beside_config=beside_config)
        | split_rank_arguments(layout, legacy=legacy)
        | _output(config, transformer_impl, legacy)
    )
    allowed = _allowed_losses(allow_lossy=allow_lossy, beside_config=beside_config)
    left_out = _require_kept(config, settings | written, allowed, legacy=legacy)
    found = settings | written
    if training.arguments:
        found = _with_run_arguments(
            config, layout, training, settings, written, left_out, legacy=legacy
        )
    return found | ({LEFT_OUT: left_out} if left_out else {})


def _allowed_losses(*, allow_lossy: bool, beside_config: bool) -> Collection[str]:
    """The fields that the arguments may lack."""
    if beside_config:
        return FIELDS
    return ("positions.scaling",) if allow_lossy else ()


def _with_run_arguments(
    config: ModelConfig, layout: Layout, training: TrainingState, settings: Mapping[str, Any], written: Mapping[str, Any],
    left_out: Collection[str], *, legacy: bool,
) -> dict[str, Any]:  # fmt: skip
    """All arguments of a source with run arguments.

    settings: the defaults for missing run arguments. written: the arguments that describe the model and how it is
    stored.
    """
    run = training.arguments
    # read_layout knows no stages of an encoder: what the run says of these is always written anew.
    encoder_stages = run.get("encoder_pipeline_model_parallel_size") or run.get(
        "pipeline_model_parallel_split_rank"
    )
    # read_layout takes one stage for numbers of stages that can't hold the model's layers.
    same_stages = run.get("pipeline_model_parallel_size") in (None, layout.pp)
    same_layout = (
        not encoder_stages and same_stages and read_layout(Namespace(**run), config) == layout
    )
    same_modules = run.get("transformer_impl") == written["transformer_impl"]
    kept = of_run(run, same_layout=same_layout, same_modules=same_modules)
    if not config.experts.count and kept.get("moe_ffn_hidden_size") is not None:
        # Early releases always have a number here, which core 0.16 refuses without experts.
        kept["moe_ffn_hidden_size"] = None
    placed = {name: kept[name] for name in LAYOUT if name in kept and same_layout}
    found = {**settings, **kept, **written, **placed}
    if not _describes(config, found, left_out, legacy=legacy):
        # An argument of the run that this model doesn't use has another meaning beside the written ones.
        computing = that_compute(kept)
        harmless = {name: value for name, value in kept.items() if name not in computing}
        found = {**settings, **harmless, **written}
    if layout.tp == 1:
        # As in Megatron itself.
        found["sequence_parallel"] = False
    return found


def _describes(
    config: ModelConfig, arguments: Mapping[str, Any], left_out: Collection[str], *, legacy: bool
) -> bool:
    """True if the arguments describe this model, except for the fields that are left out."""
    args = Namespace(**that_compute(arguments))
    try:
        back = from_arguments(args, tensor_fields(config), legacy=legacy, family=config.family)
    except CheckpointError:
        return False
    lost = lost_fields(config, back)
    return not set(lost).difference(NOT_COMPUTED, left_out)


def left_out_of_arguments(config: ModelConfig) -> tuple[str, ...]:
    """The fields that the checkpoints of a trainer's run have in their config.json alone. Megatron doesn't know them."""
    written = to_arguments(
        config,
        Layout(stage_layers=(config.layer_count,)),
        TrainingState(),
        transformer_impl="local",
        grouped_experts=False,
        vocab_divisor=1,
        padded_vocab=config.vocab,
        beside_config=True,
    )
    return tuple(written.get(LEFT_OUT, ()))


def _require_kept(
    config: ModelConfig, written: Mapping[str, Any], allowed: Collection[str], *, legacy: bool
) -> list[str]:
    """The allowed losses that occur, as field names.

    Raises NotExpressible, which names any other field that is lost.
    """
    back = from_arguments(
        Namespace(**written), tensor_fields(config), legacy=legacy, family=config.family
    )
    require_kept(config, back, "Megatron's arguments", but=(*NOT_COMPUTED, *allowed))
    return [field for field in lost_fields(config, back, but=NOT_COMPUTED) if field in allowed]


def _architecture(config: ModelConfig) -> dict[str, Any]:
    grouped = config.attention.kv_heads != config.attention.heads
    return {
        "num_layers": config.layer_count,
        "encoder_num_layers": config.layer_count,
        "decoder_num_layers": None,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.mlp.ffn,
        "num_attention_heads": config.attention.heads,
        "group_query_attention": grouped,
        "num_query_groups": config.attention.kv_heads if grouped else 1,
        "kv_channels": config.attention.head_dim,
        "normalization": config.norm.kind,
        "norm_epsilon": config.norm.epsilon,
        "layernorm_epsilon": config.norm.epsilon,
        "apply_layernorm_1p": config.norm.zero_centered,
        "layernorm_zero_centered_gamma": config.norm.zero_centered,
        "add_bias_linear": config.mlp.bias,
        "add_qkv_bias": config.attention.qkv_bias,
        "qk_layernorm": config.attention.qk_norm,
        "qk_l2_norm": config.attention.qk_l2_norm,
        "attention_output_gate": config.attention.output_gate,
        "softmax_type": "learnable" if config.attention.sinks else "vanilla",
        "swiglu": config.mlp.gated and config.mlp.activation == "silu",
        "quick_geglu": config.mlp.gated and config.mlp.activation == "quick_gelu",
        "gated_linear_unit": config.mlp.gated,
        "glu_linear_offset": config.mlp.offset,
        "activation_func_clamp_value": config.mlp.clamp,
        "squared_relu": config.mlp.activation == "relu2",
        "openai_gelu": False,
        # The fused kernel computes the approximation: in Megatron, this flag is part of the model's definition.
        "bias_gelu_fusion": config.mlp.activation == "gelu_tanh",
        "mtp_num_layers": config.mtp_layers or None,
        "window_size": (config.window - 1, 0) if config.window is not None else None,
        "window_attn_skip_freq": _window_pattern(config),
    }


def _experts(config: ModelConfig, grouped: bool) -> dict[str, Any]:
    experts = config.experts
    if not experts.count:
        return {
            "num_experts": None,
            "moe_grouped_gemm": False,
            "moe_use_legacy_grouped_gemm": False,
        }
    with_experts = [int(config.has("moe", layer)) for layer in range(config.layer_count)]
    is_before_softmax = experts.score == "softmax" and not experts.renormalize
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": 1 if all(with_experts) else with_experts,
        "moe_grouped_gemm": grouped,
        "moe_use_legacy_grouped_gemm": False,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": is_before_softmax,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_apply_probs_on_input": experts.probs_on_input,
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.group_topk,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
        **({"moe_latent_size": experts.latent} if experts.latent else {}),
        **own_router_arguments(experts),
    }


def _window_pattern(config: ModelConfig) -> list[int] | None:
    """The layers with a window as 1 and 0; None if all layers or none have one.

    Raises NotExpressible for several window sizes.
    """
    sizes = {kind.window for kind in config.layers} - {None}
    if len(sizes) > 1:
        raise NotExpressible(
            f"Megatron has one size for all windows; this model's are {sorted(map(str, sizes))}"
        )
    if not sizes or config.has("only_windows"):
        return None
    return [int(kind.window is not None) for kind in config.layers]


def _positions(config: ModelConfig, allow_lossy: bool, *, legacy: bool) -> dict[str, Any]:
    positions = config.positions
    theta = int(positions.theta) if float(positions.theta).is_integer() else positions.theta
    kind = "learned_absolute" if positions.kind == "learned" else positions.kind
    if positions.kind in UNKNOWN_POSITIONS:
        kind = "none"  # only a config.json beside the checkpoint says it
    layers_without_rope = [int(not layer.rotates) for layer in config.layers]
    scaling = {} if config.latent.kv_rank else write_scaling(config, allow_lossy, legacy=legacy)
    return {
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": kind,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": theta,
        "rotary_percent": positions.rotary_percent,
        "rotary_interleaved": positions.interleaved,
        "no_rope_freq": layers_without_rope if config.has("skips_rope") else None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
        **scaling,
    }


def _vocabulary(
    config: ModelConfig, training: TrainingState, divisor: int, padded: int
) -> dict[str, Any]:
    run = Namespace(**training.arguments)
    return {
        # GPTModel would give a tied head's stage a second embedding, although a head of scores replaces it.
        "untie_embeddings_and_output_weights": config.has("untied") or config.has("scores"),
        "make_vocab_size_divisible_by": divisor,
        "vocab_size": config.vocab - adds_a_token(run),
        "padded_vocab_size": padded,
    }


def _parallelism(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    split = split_arguments(layout)
    stages = split["pipeline_model_parallel_layout"]
    if stages is not None:
        # The loss (L) comes last, after the MTP layers (m).
        mtp_layers = "m" * config.mtp_layers
        split["pipeline_model_parallel_layout"] = stages.removesuffix("L") + mtp_layers + "L"
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if config.experts.count else layout.tp,
        "context_parallel_size": 1,
        "data_parallel_size": layout.ep,
        "world_size": layout.tp * layout.pp * layout.ep,
        **split,
    }


def _output(config: ModelConfig, transformer_impl: str, legacy: bool) -> dict[str, Any]:
    return {
        "fp16": config.dtype == "float16",
        "bf16": config.dtype == "bfloat16",
        "params_dtype": config.dtype,
        "transformer_impl": transformer_impl,
        "use_legacy_models": legacy,
        "use_mcore_models": not legacy,
        "ckpt_format": "torch",
        "no_save_optim": True,
        "no_save_rng": True,
    }


def _settings(config: ModelConfig, training: TrainingState) -> dict[str, Any]:
    """Arguments that a loader asks for and that don't describe the model, with default values."""
    routed = {"moe_token_dispatcher_type": "alltoall", "moe_extended_tp": False}
    read_by_decoder = {"decoder_seq_length": config.max_positions}
    return {
        "seq_length": config.max_positions,
        "encoder_seq_length": config.max_positions,
        **(read_by_decoder if config.encoder.layers else {}),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None,
        "vocab_file": None,
        "bert_binary_head": False,
        "apply_query_key_layer_scaling": False,
        **dropouts_of(config),
        **(routed if config.experts.count else {}),
        "sequence_parallel": False,
        "iteration": training.iteration or 0,
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
        "skipped_train_samples": 0,
        "data_parallel_random_init": False,
    }
