"""Megatron's `args` for models with an encoder: BERT and T5. Source: as in write.py."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megaconv.errors import NotExpressible, TensorMismatch, UnknownFamily
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout


def encoder_arguments(
    config: ModelConfig, transformer_impl: str, *, legacy: bool
) -> dict[str, Any]:
    """The further or different arguments of BERT and T5; empty for other models. Raises NotExpressible."""
    for refused, reason in _refusals(config, transformer_impl, legacy):
        if refused:
            raise NotExpressible(reason)
    if config.encoder.layers:
        return {
            "num_layers": config.encoder.layers,
            "encoder_num_layers": config.encoder.layers,
            "decoder_num_layers": config.layer_count,
            "relative_attention_num_buckets": config.positions.buckets or 32,
            "relative_attention_max_distance": config.positions.max_distance or 128,
        }
    if not config.has("both_ways"):
        return {}
    # openai_gelu of legacy models applies to layers and head; the fused approximation applies only to layers.
    everywhere = config.head.activation == "gelu_tanh"
    of_retriever = _retriever_arguments(config) if config.has("retriever") else {}
    return {
        **of_retriever,
        "bert_binary_head": config.has("pooler"),
        "apply_residual_connection_post_layernorm": config.has("post_norm"),
        "openai_gelu": everywhere,
        "bias_gelu_fusion": config.mlp.activation == "gelu_tanh" and not everywhere,
        "spec": ["local"] if transformer_impl == "local" and not legacy else None,
    }


def _retriever_arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments of Megatron's two biencoders, of which ICTBertModel has the pooler."""
    retriever = config.retriever
    width = retriever.projection
    return {
        "ict_head_size": width if retriever.pooler else None,
        "biencoder_projection_dim": 0 if retriever.pooler else width,
        "biencoder_shared_query_context_model": retriever.towers == "shared",
    }


def split_rank_arguments(layout: Layout, *, legacy: bool) -> dict[str, Any]:
    """The arguments for an encoder with its own pipeline stages; otherwise empty.

    Core up to 0.8, and the legacy models in it, count all stages, and give the stage where the decoder begins. Core 0.9
    to 0.13 counts the encoder's stages separately. Each refuses a checkpoint whose pipeline_model_parallel_size differs
    from its own.
    """
    if not layout.split_rank:
        return {}
    if legacy:
        return {"pipeline_model_parallel_split_rank": layout.split_rank}
    return {
        "pipeline_model_parallel_size": layout.pp - layout.split_rank,
        "encoder_pipeline_model_parallel_size": layout.split_rank,
        "encoder_tensor_model_parallel_size": layout.tp,
    }


def refuse_lost_head(args: Namespace, config: ModelConfig, where: str) -> None:
    """Raises TensorMismatch for a distributed checkpoint of a run whose encoder had its own pipeline stages.

    Core gives the encoder's last stage an untrained head, and stores it under the same keys as the decoder's head. It
    treats the decoder's head as the copy. Source: T5Model.sharded_state_dict in core 0.10 to 0.13.
    """
    if config.encoder.layers and getattr(args, "encoder_pipeline_model_parallel_size", None):
        raise TensorMismatch(
            f"{where}: the encoder had separate pipeline stages. Megatron core then stores their untrained head in "
            "place of the decoder's, so the model isn't complete here; save it with Megatron's --ckpt-format torch"
        )


def _refusals(
    config: ModelConfig, transformer_impl: str, legacy: bool
) -> Iterator[tuple[bool, str]]:
    """(whether a problem applies, why Megatron can't have this model) for each possible problem."""
    yield from _refusals_of_attention(config, legacy=legacy)
    yield from _refusals_of_bert(config, legacy=legacy)
    yield from _refusals_of_heads(config, legacy=legacy)
    if config.encoder.layers:
        yield from _refusals_of_t5(config, transformer_impl, legacy=legacy)


def _refusals_of_attention(config: ModelConfig, *, legacy: bool) -> Iterator[tuple[bool, str]]:
    yield (
        config.attention.scale is not None
        and (legacy or config.encoder.layers > 0 or config.has("both_ways")),
        "the model's attention scores are not divided by the square root of the head size; all of Megatron's are, so that "
        "it would compute something else with these weights",
    )
    yield (
        legacy and config.positions.kind == "relative",
        "the model has relative positions, which Megatron's legacy models don't support: choose --saver core",
    )


def _refusals_of_bert(config: ModelConfig, *, legacy: bool) -> Iterator[tuple[bool, str]]:
    retriever = config.retriever
    yield (
        retriever.pooler and not (retriever.projection and retriever.towers == "separate"),
        "the model has a pooler; of Megatron's biencoders, only that with two towers and --ict-head-size has one",
    )
    yield (
        config.has("post_norm both_ways") and not legacy,
        "the original BERT norms the sum of a sublayer and what it was given; of Megatron's models only the legacy ones can "
        "do that: choose --saver legacy",
    )
    if config.has("both_ways !retriever"):
        pooled = config.has("pooler")
        yield (
            config.token_types != 2 * pooled,
            f"the model has {config.token_types} token types and {_pooled_head(config) if pooled else 'no binary head'}; "
            "Megatron's BERT has two types and a head (with its pooler), or neither",
        )


def _refusals_of_heads(config: ModelConfig, *, legacy: bool) -> Iterator[tuple[bool, str]]:
    if config.head.activation:
        yield (
            config.head.activation == "gelu_tanh" and not legacy,
            "the transform before the model's head has the approximate gelu, Megatron core's has the exact one. "
            "--allow-lossy activation takes that: the logits of masked tokens then differ, by some 1e-4",
        )
        yield (
            config.head.activation == "gelu_tanh" and config.mlp.activation != "gelu_tanh",
            "the model has the approximate gelu before its head only, which Megatron doesn't support",
        )
    if config.head.activation or config.encoder.layers:
        yield (
            legacy and config.has("untied"),
            "the model's head is not its embedding; Megatron's legacy BERT and T5 have no such head: choose --saver core",
        )


def _refusals_of_t5(
    config: ModelConfig, transformer_impl: str, *, legacy: bool
) -> Iterator[tuple[bool, str]]:
    yield (
        not legacy and config.encoder.layers != config.layer_count,
        f"Megatron core gives a T5's decoder as many layers as its encoder; this model has {config.layer_count} in its decoder and "
        f"{config.encoder.layers} in its encoder: choose --saver legacy",
    )
    yield (
        not legacy and config.head.bias != config.tie_embeddings,
        "Megatron core's T5 has a bias on its head if the head is its embedding, and only then; this model differs",
    )
    yield (
        legacy and not config.head.bias,
        "Megatron's legacy T5 has a bias on its head, this model has none",
    )
    yield (
        not config.norm.final and (legacy or transformer_impl != "local"),
        "the model has no norms at the end of its stacks, as Megatron core's local T5 has without Transformer Engine; "
        "others have them: choose --saver core --transformer-impl local",
    )
    yield config.mlp.activation == "relu", "the model has relu, which Megatron doesn't support"


def _pooled_head(config: ModelConfig) -> str:
    if config.head.binary:
        return "a binary head"
    return "a classification head" if config.head.classes else "a multiple-choice head"


def sees_both_ways(given: Mapping[str, Any]) -> bool:
    """True if the fields of a configuration are those of a BERT. Every BERT has one of these heads."""
    return any(
        given.get(name)
        for name in ("head.activation", "head.classes", "head.choices", "retriever.towers")
    )


def read_encoder(args: Namespace, given: Mapping[str, Any], *, legacy: bool) -> dict[str, Any]:
    """Fields of a BERT or T5 that args contain and its tensors don't show.

    given: all other fields. Raises UnknownFamily.
    """
    if given.get("experts.count"):
        raise UnknownFamily(
            "the checkpoint has an encoder with experts, which no supported model family has"
        )
    if given.get("encoder.layers"):
        distance = getattr(args, "relative_attention_max_distance", None) or 128
        return {
            "positions.max_distance": distance if given.get("positions.kind") == "relative" else 0
        }
    plain = {
        "positions.kind": "learned",
        "norm.kind": "LayerNorm",
        "mlp.gated": False,
        "attention.qkv_bias": True,
        "mlp.bias": True,
    }
    other = {name: given.get(name) for name, usual in plain.items() if given.get(name) != usual}
    if other:
        raise UnknownFamily(
            f"the checkpoint has BERT's head, but not its layers ({other}); expected {plain}"
        )
    both = legacy and given.get("head.activation") and getattr(args, "openai_gelu", False)
    follows = {"head.activation": "gelu_tanh"} if both else {}
    return {"norm.place": "after_sum" if getattr(args, POST_NORM, False) else "before", **follows}


POST_NORM = "apply_residual_connection_post_layernorm"
"""Legacy models follow this argument; core up to 0.19 accepts and ignores it."""
