"""BERT in two forms: Megatron's (each norm before its sublayer, MegatronBert in transformers), and the original.

The original BERT normalizes the sum of a sublayer's input and output. In Megatron, this is the legacy model with
apply_residual_connection_post_layernorm, which continues with the norms' outputs. The first norm of a layer is then the
norm that ends the layer before. The first norm of layer 0 is the embedding's norm, and the norm that ends the last
layer is the final norm.

    Megatron     input_norm 0           input_norm 1 .. L-1             final_norm
    Bert         embeddings.LayerNorm   layer.0 .. L-2 output.LayerNorm   layer.L-1 output.LayerNorm

A BERT that was finetuned for a task has one head on its pooled first token instead of the heads of pretraining. The
head predicts classes (Megatron's MNLI and QQP), or a score for each choice (RACE).
"""

from collections.abc import Collection
from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.keys import (
    Fields,
    Keys,
    Raw,
    choice,
    number,
    size,
)
from megaconv.families.parts.scores import label_count, label_names
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
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


def _linear(
    name: str, rows: str, when: str | None, hf: str, core: str, legacy: str
) -> tuple[Row, ...]:
    """The rows of a linear layer of the last stage. Every tensor-parallel rank holds the whole layer."""
    return tuple(
        Row(f"{name}.{word}", (shape,), stage="last", when=when, hf=f"{hf}.{word}", core=f"{core}.{word}", legacy=f"{legacy}.{word}")
        for word, shape in (("weight", f"{rows} hidden"), ("bias", rows))
    )  # fmt: skip


FINAL_NORM = (_FINAL_NORM, replace(_FINAL_NORM.renamed(hf=_OUTPUT_NORM), when="post_norm"))
POOLER = _linear(
    "pooler", "hidden", "pooler", "bert.pooler.dense", "pooler.dense", "language_model.pooler.dense"
)

HEADS = (
    *FINAL_NORM,
    *_linear("transform.dense", "hidden", "transform", "cls.predictions.transform.dense", "lm_head.dense", "lm_head.dense"),
    Row("transform.norm.{weight|bias}", ("hidden", "hidden"), stage="last", when="transform",
        hf="cls.predictions.transform.LayerNorm.{weight|bias}",
        core="lm_head.layer_norm.{weight|bias}",
        legacy="lm_head.norm.{weight|bias}"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="cls.predictions.decoder.weight",
        core="output_layer.weight",
        legacy="language_model.output_layer.weight"),
    Row("head.bias", ("vocab",), tp=0, stage="last", when="transform", padded_vocab=True,
        hf="cls.predictions.bias",
        core="output_layer.bias",
        legacy="lm_head.bias",
        copies=(Copied("itself", {"hf": ("cls.predictions.decoder.bias",)}),)),
    *_linear("binary_head", "2", "binary_head", "cls.seq_relationship", "binary_head", "binary_head"),
    *POOLER,
    *_linear("classification_head", "classes", "classification_head", "classifier", "classification_head", "classification_head"),
    *_linear("multichoice_head", "1", "multichoice_head", "classifier", "multichoice_head", "multichoice_head"),
)  # fmt: skip

ROWS = (*EMBEDDINGS, *LAYERS, *HEADS)
IGNORED = (r"bert\.embeddings\.position_ids",)
"""Older files store the position numbers 0, 1, 2 ..."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_PRETRAINING = "ForPreTraining"
_MASKED = "ForMaskedLM"
_CLASSES = "ForSequenceClassification"
_CHOICES = "ForMultipleChoice"
_MODELS = (_PRETRAINING, _MASKED, _CLASSES, _CHOICES)
_ORIGINAL = tuple("Bert" + model for model in _MODELS)
_MEGATRON = tuple("MegatronBert" + model for model in _MODELS)


def _read_activation(raw: Raw) -> Fields:
    (found,) = choice("hidden_act", "mlp.activation", ACTIVATIONS, "gelu").read(raw).values()
    return {"mlp.activation": found, "head.activation": found}


def _write_activation(config: ModelConfig) -> Raw:
    if config.head.activation not in ("", config.mlp.activation):
        raise NotExpressible(
            f"the model's layers have {config.mlp.activation} and the transform before its head has {config.head.activation}; "
            f"{_architecture(config)} has one hidden_act for both. --allow-lossy activation takes that of the layers: "
            "the logits of masked tokens then differ, by some 1e-4"
        )
    return {"hidden_act": "gelu_new" if config.mlp.activation == "gelu_tanh" else "gelu"}


def _read_architecture(raw: Raw) -> Fields:
    usual = _ORIGINAL[0] if raw.get("model_type") == "bert" else _MEGATRON[0]
    (architecture,) = raw.get("architectures") or (usual,)
    place = "after_sum" if architecture in _ORIGINAL else "before"
    found = {"norm.place": place, "head.binary": architecture.endswith(_PRETRAINING)}
    if architecture.endswith(_CLASSES):
        found["head.classes"] = label_count(raw)
    return found | {"head.choices": architecture.endswith(_CHOICES)}


def _write_architecture(config: ModelConfig) -> Raw:
    if config.has("untied"):
        raise NotExpressible(
            f"the model's head is not its embedding; {_architecture(config)} has no bias for such a head"
        )
    model_type = "bert" if config.has("post_norm") else "megatron-bert"
    return {"architectures": [_architecture(config)], "model_type": model_type}


def _architecture(config: ModelConfig) -> str:
    if config.head.classes:
        model = _CLASSES
    elif config.head.choices:
        model = _CHOICES
    else:
        model = _PRETRAINING if config.head.binary else _MASKED
    return ("Bert" if config.has("post_norm") else "MegatronBert") + model


def _read_task(raw: Raw) -> Fields:
    """The fields of a task head: it has no transform, and no vocabulary matrix that could be tied to the embedding."""
    found = _read_architecture(raw)
    return (
        {"head.activation": "", "tie_embeddings": False}
        if found.get("head.classes") or found["head.choices"]
        else {}
    )


def _write_task(config: ModelConfig) -> Raw:
    if not config.has("classification_head"):
        return {"tie_word_embeddings": True} if config.has("multichoice_head") else {}
    return label_names(config.head.classes) | {"tie_word_embeddings": True}


def _write_token_types(config: ModelConfig) -> Raw:
    if not config.token_types:
        raise NotExpressible(
            f"the model has no token types, which {_architecture(config)} always adds to its embeddings"
        )
    return {"type_vocab_size": config.token_types}


_KEYS = (
    size("hidden_size", "hidden"),
    size("num_hidden_layers", "layers.count"),
    size("intermediate_size", "mlp.ffn"),
    size("max_position_embeddings", "max_positions", 512),
    multi_head("num_attention_heads", "hidden_size"),
    number("layer_norm_eps", "norm.epsilon", 1e-12),
    Keys(("hidden_act",), _read_activation, _write_activation),
    Keys(
        ("type_vocab_size",),
        lambda raw: {"token_types": raw.get("type_vocab_size", 2)},
        _write_token_types,
    ),
    Keys(("architectures", "model_type"), _read_architecture, _write_architecture),
    *model_keys(tied=True, tokens=(None, None, 0)),
    Keys((), _read_task, _write_task),  # reads id2label, which has no effect in any other model
)
ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


def complete(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set the heads by the tensors: files of a masked language model may still hold the pooler and the head of its
    training."""
    has_head = "cls.seq_relationship.weight" in names
    found = changed(config, {"head.binary": has_head})
    return replace(found, hf={**(config.hf or {}), "architectures": [_architecture(found)]})


FAMILY = Family(
    name="bert",
    architectures=(*_MEGATRON, *_ORIGINAL),
    model_type="megatron-bert",
    rows=ROWS,
    keys=_KEYS,
    fixed=LEARNED_POSITIONS | ALL_BIASES,
    only=ONLY,
    ignored=IGNORED,
    prefix="bert.",
    older={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
    complete=complete,
    recognized="learned norm_bias !gated !encoder both_ways !retriever !mixture",
)
