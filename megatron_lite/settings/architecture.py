"""The model of a run: from flags, or from a checkpoint that no flag may contradict."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.megatron.arguments.read import from_arguments
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.pattern import pattern_of
from megaconv.model.retrieving import Retriever
from megaconv.model.training import TrainingState
from megatron_lite.settings.config import Settings, flags
from megatron_lite.settings.hybrid_layers import hybrid_fields, is_mamba_hybrid, linear_layers
from megatron_lite.settings.layer_lists import read_list
from megatron_lite.settings.model import Model
from megatron_lite.settings.retro import OF_MODEL

FREE = ("init_method_std", "make_vocab_size_divisible_by", "attention_dropout", "hidden_dropout")
"""Model settings that a checkpoint does not fix, or that may differ from the checkpoint."""
OF_ATTENTION = (
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "qk_layernorm",
)
OF_MLP = ("ffn_hidden_size", "swiglu", "squared_relu", "no_bias_gelu_fusion")
"""Settings of parts that a model may lack. A checkpoint without the part doesn't keep them."""


OF_THEIR_OWN = ("bert", "biencoder", "t5")
"""Families with their own --model-type; all others are decoders, `gpt`."""


def model_type(settings: Settings, config: ModelConfig | None) -> str:
    """Return the model type. Raises UsageError if a flag contradicts the checkpoint.

    config: of the checkpoint that the run starts from; None without a checkpoint.
    """
    asked = settings.model.model_type
    if config is None:
        return asked or "gpt"
    found = config.family if config.family in OF_THEIR_OWN else "gpt"
    if found == "bert" and asked == "biencoder" and settings.retrieval.bert_load is not None:
        return asked
    if asked not in (None, found):
        raise UsageError(
            f"--model-type {asked} contradicts the checkpoint, which is a {config.family}; leave the flag out"
        )
    return found


def model_from_flags(settings: Settings, vocab: int) -> ModelConfig:
    """Return the model that the flags describe. vocab: size of the tokenizer's vocabulary.

    Raises UsageError for missing sizes, UnknownFamily for a model without a table, NotExpressible for layers without
    experts in a family that has none.
    """
    settings = with_layers(settings)
    model = settings.model
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(model, name) is None:
            raise UsageError(
                f"--{name.replace('_', '-')} is missing (or --load a checkpoint, which has it)"
            )
    assert model.hidden_size is not None
    assert model.num_attention_heads is not None
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise UsageError(
            f"--hidden-size {model.hidden_size} can't be divided by --num-attention-heads {model.num_attention_heads}; "
            "choose others, or give --kv-channels"
        )
    found = _base_fields(model, vocab)
    found |= hybrid_fields(model)
    if model.mtp_num_layers:
        found["mtp_layers"] = model.mtp_num_layers
    if settings.retro.retro_add_retriever:
        found |= {
            "retrieval.layers": settings.retro.retro_encoder_layers,
            "norm.final": not settings.retro.retro_no_final_norm,
        }
    kind = model_type(settings, None)
    if kind == "bert":
        found |= _of_bert(settings)
    if kind == "biencoder":
        found |= _of_biencoder(settings)
    if kind == "t5":
        found |= _of_t5(settings)
    arguments = _as_arguments(settings, found["mlp.ffn"])
    config = from_arguments(arguments, found, family=None if kind == "gpt" else kind)
    _check_dense_layers(config)
    return config


def _check_dense_layers(config: ModelConfig) -> None:
    """Raise NotExpressible for layers without experts in a family whose models have experts in all layers."""
    has_names = any("dense" in (row.when or "").split() for row in family(config.family).rows)
    has_dense = any(config.has("dense", layer) for layer in range(config.layer_count))
    if config.experts.count and has_dense and not has_names:
        raise NotExpressible(
            f"--moe-layer-freq: the model would be a {config.family} with layers without experts, which no checkpoint has names for; "
            "leave the flag out, or make the model a Qwen 3 MoE (--qk-layernorm)"
        )


def _base_fields(model: Model, vocab: int) -> dict[str, Any]:
    """Return the fields that every decoder has."""
    bias = not model.disable_bias_linear
    found: dict[str, Any] = {
        "layers.count": model.num_layers,
        "hidden": model.hidden_size,
        "mlp.ffn": model.ffn_hidden_size or _ffn(model),
        "vocab": vocab,
        "mlp.gated": model.swiglu,
        "tie_embeddings": not model.untie_embeddings_and_output_weights,
        "attention.qkv_bias": bias or model.add_qkv_bias,
        "attention.o_bias": bias,
        "mlp.bias": bias,
        "attention.qk_norm": model.qk_layernorm,
    }
    if model.num_experts:
        found |= {
            "experts.count": model.num_experts,
            "layers.mlp": tuple("experts" if one else "dense" for one in _with_experts(model)),
            "experts.shared_gate": model.moe_shared_expert_gate,
            "experts.router_bias": model.moe_router_enable_expert_bias,
            "experts.latent": model.moe_latent_size or 0,
        }
    return found


def with_layers(settings: Settings) -> Settings:
    """Return the settings with num_layers set from T5's other flags for it, or from a hybrid's pattern.

    Raises UsageError if T5's flags differ.
    """
    model = settings.model
    named = {
        name: count
        for name in ("num_layers", "encoder_num_layers", "decoder_num_layers")
        if (count := getattr(model, name)) is not None
    }
    if len(set(named.values())) > 1:
        given = " and ".join(f"--{name.replace('_', '-')} {count}" for name, count in named.items())
        raise UsageError(
            f"{given}: Megatron core gives a T5's decoder as many layers as its encoder; give one number"
        )
    counts = [*named.values()]
    if not counts and model.hybrid_override_pattern:
        counts = [len(model.hybrid_override_pattern)]
    return replace(settings, model=replace(model, num_layers=next(iter(counts), None)))


def _of_bert(settings: Settings) -> dict[str, Any]:
    """Return BERT's fields. Megatron has token types, pooler and binary head together, or none of them."""
    binary = not settings.model.bert_no_binary_head
    return {"head.activation": "gelu", "head.binary": binary, "token_types": 2 * binary}


def _of_biencoder(settings: Settings) -> dict[str, Any]:
    """Return a biencoder's fields. Its towers have token types, as in Megatron."""
    retriever = retriever_of(settings.model)
    found = {f"retriever.{name}": value for name, value in vars(retriever).items()}
    return {**found, "token_types": 2, "tie_embeddings": False}


def retriever_of(model: Model) -> Retriever:
    """Return the towers that the flags describe. Raises UsageError for flags of both kinds of Megatron's models."""
    shared, pooled = model.biencoder_shared_query_context_model, model.ict_head_size is not None
    if pooled and (model.biencoder_projection_dim or shared):
        other = "--biencoder-shared-query-context-model" if shared else "--biencoder-projection-dim"
        raise UsageError(
            f"--ict-head-size and {other} are of two models of Megatron-LM; give one of them"
        )
    width = model.ict_head_size or model.biencoder_projection_dim
    return Retriever("shared" if shared else "separate", width, pooled)


def _of_t5(settings: Settings) -> dict[str, Any]:
    """Return T5's fields, as in core: both stacks have the same number of layers.

    Local layers, without Transformer Engine, have no norms at the ends of the stacks.
    """
    model = settings.model
    return {
        "encoder.layers": model.num_layers, "head.bias": not model.untie_embeddings_and_output_weights,
        "norm.final": settings.checkpointing.transformer_impl != "local",
    }  # fmt: skip


def _with_experts(model: Model) -> list[bool]:
    """Return for each layer whether it has experts, from --moe-layer-freq.

    The flag is a number N for every N-th layer from the first on, or lists of 0 and 1: `[0]*3+[1]*58`.
    """
    text = (model.moe_layer_freq or "1").replace(" ", "").strip("()")
    layers = model.num_layers or 0
    if text.isdigit() and int(text):
        return [layer % int(text) == 0 for layer in range(layers)]
    found = read_list(text)
    if found is None or len(found) != layers:
        raise UsageError(
            f"--moe-layer-freq {text} should be a number, or as many 0 and 1 as layers ({layers}): [0]*1+[1]*{layers - 1}"
        )
    return found


def _have_experts(config: ModelConfig) -> list[bool]:
    return [config.has("moe", layer) for layer in range(config.layer_count)]


def _ffn(model: Model) -> int:
    """Return Megatron's default: 4 x hidden; gated 8/3 x hidden, rounded down to a multiple of 64."""
    assert model.hidden_size
    return int(4 * model.hidden_size * 2 / 3) // 64 * 64 if model.swiglu else 4 * model.hidden_size


def _as_arguments(settings: Settings, ffn: int) -> Namespace:
    """Return the values of Megatron's args that from_arguments reads."""
    values: dict[str, Any] = dict(vars(settings.model))
    values["ffn_hidden_size"] = ffn
    if settings.retro.retro_add_retriever:
        values |= {name: getattr(settings.retro, name) for name in OF_MODEL}
    values["bias_gelu_fusion"] = not settings.model.no_bias_gelu_fusion
    if settings.model.disable_bias_linear and is_mamba_hybrid(settings.model):
        values["bias_gelu_fusion"] = False  # as in Megatron-LM, which then computes the exact GELU
    if settings.model.multi_latent_attention:
        scaled = settings.model.rotary_scaling_factor != 1
        values["rope_type"] = settings.model.rope_type or ("yarn" if scaled else "rope")
        values["q_lora_rank"] = settings.model.q_lora_rank or 0
    elif settings.model.rotary_scaling_factor != 1:
        raise UsageError(
            "--rotary-scaling-factor is of latent attention's yarn: it needs --multi-latent-attention"
        )
    values["linear_attention_freq"] = None  # the fields of the layers say it
    training = settings.training
    values["max_position_embeddings"] = (
        settings.model.max_position_embeddings or training.seq_length or training.encoder_seq_length
    )
    return Namespace(**{name: value for name, value in values.items() if value is not None})


def check_against(
    settings: Settings, config: ModelConfig, dropouts: Mapping[str, float], source: str
) -> None:
    """Raise UsageError for the first flag that contradicts the checkpoint at source."""
    stated = _stated(config) | dict(dropouts)
    if "moe_layer_freq" in stated:
        stated["moe_layer_freq"] = _have_experts(config)
    if "linear_attention_freq" in stated:
        stated["linear_attention_freq"] = [kind.mixer == "linear" for kind in config.layers]
    has_no_vocabulary = settings.data.tokenizer_type == "NullTokenizer"
    without_effect = _settings_of_lacking_parts(config)
    for name in sorted(settings.given):
        subject, _ = flags()[name]
        is_free = (name in FREE and name not in dropouts) or name in without_effect
        if subject != "model" or is_free or name not in stated:
            continue
        if name == "vocab_size" and has_no_vocabulary:
            continue  # here it is the tokenizer's size; NullTokenizer adds a token
        asked = getattr(settings.model, name)
        held = stated[name]
        model = replace(settings.model, num_layers=config.layer_count)
        if name == "moe_layer_freq":
            asked = _with_experts(model)
        if name == "linear_attention_freq":
            asked = linear_layers(model)
        is_off = asked is False and held is None
        if asked != held and not is_off:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} {asked} contradicts the checkpoint {source}, which has {held}; leave the flag out"
            )


def _settings_of_lacking_parts(config: ModelConfig) -> tuple[str, ...]:
    has_attention = any(kind.mixer not in ("mamba", "none") for kind in config.layers)
    has_mlp = any(kind.mlp != "none" for kind in config.layers)
    return (() if has_attention else OF_ATTENTION) + (() if has_mlp else OF_MLP)


def _stated(config: ModelConfig) -> dict[str, Any]:
    """Return the model's arguments by the name of the flag, as its checkpoint states them."""
    stated = to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), transformer_impl="local", grouped_experts=False,
        vocab_divisor=1, padded_vocab=config.vocab, beside_config=True,
    )  # fmt: skip
    scaling = config.positions.scaling or {}
    stated |= {
        "disable_bias_linear": not stated["add_bias_linear"],
        "no_bias_gelu_fusion": not stated["bias_gelu_fusion"],
        "num_query_groups": config.attention.kv_heads,
        "rope_scaling_factor": scaling.get("factor", stated["rope_scaling_factor"]),
        "moe_latent_size": config.experts.latent or None,
    }
    if stated.get("hybrid_layer_pattern"):
        # The flag has no form for the layers that predict further tokens.
        stated["hybrid_override_pattern"] = pattern_of(config)
    if "bert_binary_head" in stated:
        stated["bert_no_binary_head"] = not stated["bert_binary_head"]
    return stated
