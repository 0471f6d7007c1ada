"""BERT: Megatron's own (each norm before its sublayer, MegatronBert in transformers), and the original.

The original BERT norms the sum of a sublayer and what it was given. That is Megatron's legacy model told to carry on what its
norms give (apply_residual_connection_post_layernorm): a layer's first norm is then the one that ends the layer before it,
that of layer 0 the embedding's, and the one that ends the last layer is the final norm.

    Megatron     input_norm 0           input_norm 1 .. L-1             final_norm
    Bert         embeddings.LayerNorm   layer.0 .. L-2 output.LayerNorm   layer.L-1 output.LayerNorm
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.hf_config import read_hf_common, refuse
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, Row

_CANONICAL = "encoder.layers.{l}."
_HF = "bert.encoder.layer.{l}."
_CORE = "encoder.layers.{l}."
_LEGACY = "language_model.encoder.layers.{l}."
_HEADS = "heads*head_dim"


_INPUT_NORM = Row(
    _CANONICAL + "input_norm.{weight|bias}", ("hidden", "hidden"), when="pre_norm",
    hf=_HF + "attention.ln.{weight|bias}",
    core=_CORE + "self_attention.linear_qkv.layer_norm_{weight|bias}",
    core_local=_CORE + "input_layernorm.{weight|bias}",
    legacy=_LEGACY + "input_norm.{weight|bias}",
)  # fmt: skip
_MLP_NORM = Row(
    _CANONICAL + "mlp_norm.{weight|bias}", ("hidden", "hidden"), when="pre_norm",
    hf=_HF + "ln.{weight|bias}",
    core=_CORE + "mlp.linear_fc1.layer_norm_{weight|bias}",
    core_local=_CORE + "pre_mlp_layernorm.{weight|bias}",
    legacy=_LEGACY + "post_attention_norm.{weight|bias}",
)  # fmt: skip
_FINAL_NORM = Row(
    "final_norm.{weight|bias}", ("hidden", "hidden"), stage="last", when="pre_norm",
    hf="bert.encoder.ln.{weight|bias}",
    core="encoder.final_layernorm.{weight|bias}",
    legacy="language_model.encoder.final_norm.{weight|bias}",
)  # fmt: skip
_OUTPUT_NORM = "bert.encoder.layer.{l-1}.output.LayerNorm.{weight|bias}"

EMBEDDINGS = (
    Row("embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
        hf="bert.embeddings.word_embeddings.weight",
        core="embedding.word_embeddings.weight",
        legacy="language_model.embedding.word_embeddings.weight",
        copies=(Copied("head", {"hf": ("cls.predictions.decoder.weight",), "core": ("output_layer.weight",),
                                "legacy": ("word_embeddings_for_head.weight",)}),)),
    Row("positions.weight", ("max_positions hidden",), stage="first",
        hf="bert.embeddings.position_embeddings.weight",
        core="embedding.position_embeddings.weight",
        legacy="language_model.embedding.position_embeddings.weight"),
    Row("token_types.weight", ("token_types hidden",), stage="first", when="token_types",
        hf="bert.embeddings.token_type_embeddings.weight",
        core="embedding.tokentype_embeddings.weight",
        legacy="language_model.embedding.tokentype_embeddings.weight"),
)  # fmt: skip

LAYERS = (
    _INPUT_NORM,
    replace(_INPUT_NORM.renamed(hf="bert.embeddings.LayerNorm.{weight|bias}"), when="post_norm first_layer"),
    replace(_INPUT_NORM.renamed(hf=_OUTPUT_NORM), when="post_norm later_layer"),
    Row(_CANONICAL + "attn.{q|k|v}.weight", (f"{_HEADS} hidden",) * 3, tp=0,
        hf=_HF + "attention.self.{query|key|value}.weight",
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.weight", groups="kv_heads")),
    Row(_CANONICAL + "attn.{q|k|v}.bias", (_HEADS,) * 3, tp=0,
        hf=_HF + "attention.self.{query|key|value}.bias",
        core=Fused(_CORE + "self_attention.linear_qkv.bias", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.bias", groups="kv_heads")),
    Row(_CANONICAL + "attn.o.weight", (f"hidden {_HEADS}",), tp=1,
        hf=_HF + "attention.output.dense.weight",
        core=_CORE + "self_attention.linear_proj.weight",
        legacy=_LEGACY + "self_attention.dense.weight"),
    Row(_CANONICAL + "attn.o.bias", ("hidden",),
        hf=_HF + "attention.output.dense.bias",
        core=_CORE + "self_attention.linear_proj.bias",
        legacy=_LEGACY + "self_attention.dense.bias"),
    _MLP_NORM,
    replace(_MLP_NORM.renamed(hf=_HF + "attention.output.LayerNorm.{weight|bias}"), when="post_norm"),
    Row(_CANONICAL + "mlp.up.weight", ("ffn hidden",), tp=0,
        hf=_HF + "intermediate.dense.weight",
        core=_CORE + "mlp.linear_fc1.weight",
        legacy=_LEGACY + "mlp.dense_h_to_4h.weight"),
    Row(_CANONICAL + "mlp.up.bias", ("ffn",), tp=0,
        hf=_HF + "intermediate.dense.bias",
        core=_CORE + "mlp.linear_fc1.bias",
        legacy=_LEGACY + "mlp.dense_h_to_4h.bias"),
    Row(_CANONICAL + "mlp.down.weight", ("hidden ffn",), tp=1,
        hf=_HF + "output.dense.weight",
        core=_CORE + "mlp.linear_fc2.weight",
        legacy=_LEGACY + "mlp.dense_4h_to_h.weight"),
    Row(_CANONICAL + "mlp.down.bias", ("hidden",),
        hf=_HF + "output.dense.bias",
        core=_CORE + "mlp.linear_fc2.bias",
        legacy=_LEGACY + "mlp.dense_4h_to_h.bias"),
)  # fmt: skip


def _linear(name: str, rows: str, when: str | None, hf: str, core: str, legacy: str) -> tuple[Row, ...]:
    """A linear layer of the last stage, which every tensor rank holds whole."""
    return tuple(
        Row(f"{name}.{word}", (shape,), stage="last", when=when, hf=f"{hf}.{word}", core=f"{core}.{word}", legacy=f"{legacy}.{word}")
        for word, shape in (("weight", f"{rows} hidden"), ("bias", rows))
    )  # fmt: skip


HEADS = (
    _FINAL_NORM,
    replace(_FINAL_NORM.renamed(hf=_OUTPUT_NORM), when="post_norm"),
    *_linear("transform.dense", "hidden", None, "cls.predictions.transform.dense", "lm_head.dense", "lm_head.dense"),
    Row("transform.norm.{weight|bias}", ("hidden", "hidden"), stage="last",
        hf="cls.predictions.transform.LayerNorm.{weight|bias}",
        core="lm_head.layer_norm.{weight|bias}",
        legacy="lm_head.norm.{weight|bias}"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="cls.predictions.decoder.weight",
        core="output_layer.weight",
        legacy="language_model.output_layer.weight"),
    Row("head.bias", ("vocab",), tp=0, stage="last", padded_vocab=True,
        hf="cls.predictions.bias",
        core="output_layer.bias",
        legacy="lm_head.bias",
        copies=(Copied("itself", {"hf": ("cls.predictions.decoder.bias",)}),)),
    *_linear("binary_head", "2", "binary_head", "cls.seq_relationship", "binary_head", "binary_head"),
    *_linear("pooler", "hidden", "binary_head", "bert.pooler.dense", "pooler.dense", "language_model.pooler.dense"),
)  # fmt: skip

ROWS = (*EMBEDDINGS, *LAYERS, *HEADS)
IGNORED = (r"bert\.embeddings\.position_ids",)
"""Older files keep the numbers from 0 on."""

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_ORIGINAL = ("BertForPreTraining", "BertForMaskedLM")
_MEGATRON = ("MegatronBertForPreTraining", "MegatronBertForMaskedLM")


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    activation = raw.get("hidden_act", "gelu")
    positions = raw.get("position_embedding_type", "absolute")
    if activation not in _ACTIVATIONS or positions != "absolute" or raw.get("is_decoder"):
        raise NotExpressible(
            f"config.json: hidden_act {activation!r}, {positions} positions or is_decoder is not BERT's own; only that is known"
        )
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if hidden % heads:
        raise CorruptCheckpoint(f"config.json: num_attention_heads {heads} doesn't divide hidden_size {hidden}")
    (architecture,) = raw.get("architectures") or (_ORIGINAL[0] if raw.get("model_type") == "bert" else _MEGATRON[0],)
    return ModelConfig(
        family="bert",
        layers=raw["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=raw["intermediate_size"],
        max_positions=raw.get("max_position_embeddings", 512),
        norm_epsilon=raw.get("layer_norm_eps", 1e-12),
        rope_theta=10000.0,
        positions="learned",
        normalization="LayerNorm",
        activation=_ACTIVATIONS[activation],
        head_activation=_ACTIVATIONS[activation],
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        post_norm=architecture in _ORIGINAL,
        token_types=raw.get("type_vocab_size", 2),
        binary_head=architecture.endswith("ForPreTraining"),
        **read_hf_common({"pad_token_id": 0, **raw}, tied=True),
    )


def complete(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Files of a masked language model may still hold the pooler and the head that it was trained with."""
    has_head = "cls.seq_relationship.weight" in names
    return replace(config, binary_head=has_head, hf={**(config.hf or {}), "architectures": [_kind(config, has_head)]})


def _kind(config: ModelConfig, has_binary_head: bool) -> str:
    return (_ORIGINAL if config.post_norm else _MEGATRON)[0 if has_binary_head else 1]


def write_hf(config: ModelConfig) -> dict[str, Any]:
    kind = _kind(config, config.binary_head)
    refuse(config, kind, qk_norm="q and k norms", sliding_window="a sliding window", experts="experts")
    if not config.token_types:
        raise NotExpressible(f"the model has no token types, which {kind} always adds to its embeddings")
    if not config.tie_embeddings:
        raise NotExpressible(f"the model's head is not its embedding; {kind} has no bias for such a head")
    if config.head_activation != config.activation:
        raise NotExpressible(
            f"the model's layers have {config.activation} and the transform before its head has {config.head_activation}; "
            f"{kind} has one hidden_act for both. --allow-lossy activation takes that of the layers: "
            "the logits of masked tokens then differ, by some 1e-4"
        )
    return {
        "architectures": [kind],
        "model_type": "bert" if config.post_norm else "megatron-bert",
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "layer_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "type_vocab_size": config.token_types,
        "vocab_size": config.vocab,
        "pad_token_id": config.pad_token_id,
    }


FAMILY = Family(
    "bert", (*_MEGATRON, *_ORIGINAL), "megatron-bert", ROWS, read_hf, write_hf, IGNORED,
    prefix="bert.", older={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}, complete=complete,
)  # fmt: skip
