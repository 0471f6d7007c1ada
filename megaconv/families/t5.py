"""T5: an encoder, and a decoder that attends to it. Megatron's T5 computes another function than transformers' T5.

Megatron divides attention scores by the square root of the head size. Unless configured otherwise, it has biases,
LayerNorm and learned positions. T5ForConditionalGeneration has none of these. megaconv reads and writes both, each with
its own keys, and refuses features that the other side lacks.
"""

from collections.abc import Collection
from dataclasses import replace

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_flag,
    need_size,
    number,
    size,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, Row

_HEADS = "heads*head_dim"


_STAGE = {"encoder": "encoder", "decoder": "layer"}


def _norm(
    stack: str, name: str, hf: str, core: str, core_local: str, legacy: str
) -> tuple[Row, ...]:
    """The rows of a norm before a sublayer. A LayerNorm also has a bias."""
    layer = f"{stack}.layers.{{l}}."
    return tuple(
        Row(f"{layer}{name}.{word}", ("hidden",), stage=_STAGE[stack], when=when,
            hf=f"{stack}.block.{{l}}.layer.{hf}.layer_norm.{word}",
            core=f"{layer}{core}{word}",
            core_local=f"{layer}{core_local}.{word}",
            legacy=f"language_model.{layer}{legacy}.{word}")
        for word, when in (("weight", None), ("bias", "norm_bias"))
    )  # fmt: skip


def _attention(stack: str) -> tuple[Row, ...]:
    """The rows of self-attention in a stack's layers."""
    stage = _STAGE[stack]
    layer = f"{stack}.layers.{{l}}."
    hf = f"{stack}.block.{{l}}.layer.0.SelfAttention."
    core = f"{layer}self_attention."
    legacy = f"language_model.{layer}self_attention."
    return (
        *_norm(stack, "input_norm", "0", "self_attention.linear_qkv.layer_norm_", "input_layernorm", "input_norm"),
        Row(layer + "attn.{q|k|v}.weight", (f"{_HEADS} hidden",) * 3, tp=0, stage=stage,
            hf=hf + "{q|k|v}.weight",
            core=Fused(core + "linear_qkv.weight", groups="kv_heads"),
            legacy=Fused(legacy + "query_key_value.weight", groups="kv_heads")),
        Row(layer + "attn.{q|k|v}.bias", (_HEADS,) * 3, tp=0, stage=stage, when="qkv_bias",
            hf=hf + "{q|k|v}.bias",
            core=Fused(core + "linear_qkv.bias", groups="kv_heads"),
            legacy=Fused(legacy + "query_key_value.bias", groups="kv_heads")),
        Row(layer + "attn.o.weight", (f"hidden {_HEADS}",), tp=1, stage=stage,
            hf=hf + "o.weight",
            core=core + "linear_proj.weight",
            legacy=legacy + "dense.weight"),
        Row(layer + "attn.o.bias", ("hidden",), stage=stage, when="o_bias",
            hf=hf + "o.bias",
            core=core + "linear_proj.bias",
            legacy=legacy + "dense.bias"),
    )  # fmt: skip


def _mlp(stack: str, part: int, norm: str) -> tuple[Row, ...]:
    """The rows of an MLP.

    part: number of the MLP among the parts of a layer in Hugging Face's names. norm: name of the norm before it in
    Megatron's models before core.
    """
    stage = _STAGE[stack]
    layer = f"{stack}.layers.{{l}}."
    hf = f"{stack}.block.{{l}}.layer.{part}.DenseReluDense."
    core = f"{layer}mlp.linear_"
    legacy = f"language_model.{layer}mlp.dense_"
    return (
        *_norm(stack, "mlp_norm", str(part), "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm", norm),
        Row(layer + "mlp.up.weight", ("ffn hidden",), tp=0, stage=stage, when="plain",
            hf=hf + "wi.weight",
            core=core + "fc1.weight",
            legacy=legacy + "h_to_4h.weight"),
        Row(layer + "mlp.up.bias", ("ffn",), tp=0, stage=stage, when="plain mlp_bias",
            hf=hf + "wi.bias",
            core=core + "fc1.bias",
            legacy=legacy + "h_to_4h.bias"),
        Row(layer + "mlp.{gate|up}.weight", ("ffn hidden",) * 2, tp=0, stage=stage, when="gated",
            hf=hf + "{wi_0|wi_1}.weight",
            core=Fused(core + "fc1.weight"),
            legacy=Fused(legacy + "h_to_4h.weight")),
        Row(layer + "mlp.{gate|up}.bias", ("ffn",) * 2, tp=0, stage=stage, when="gated mlp_bias",
            hf=hf + "{wi_0|wi_1}.bias",
            core=Fused(core + "fc1.bias"),
            legacy=Fused(legacy + "h_to_4h.bias")),
        Row(layer + "mlp.down.weight", ("hidden ffn",), tp=1, stage=stage,
            hf=hf + "wo.weight",
            core=core + "fc2.weight",
            legacy=legacy + "4h_to_h.weight"),
        Row(layer + "mlp.down.bias", ("hidden",), stage=stage, when="mlp_bias",
            hf=hf + "wo.bias",
            core=core + "fc2.bias",
            legacy=legacy + "4h_to_h.bias"),
    )  # fmt: skip


def _relative_bias(stack: str, stage: str) -> Row:
    """The bias that a stack adds to its attention scores by distance. If the stacks have separate stages, every stage
    has a copy."""
    return Row(
        f"{stack}.relative_bias.weight", ("relative_buckets heads",), stage=stage, when="relative", copies=(Copied("stacks"),),
        hf=f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        core=f"{stack}_relative_pos_emb.relative_attention_bias.weight",
    )  # fmt: skip


def _final_norm(stack: str, stage: str) -> tuple[Row, ...]:
    """The rows of the norm after a stack."""
    hf, core = f"{stack}.final_layer_norm.", f"{stack}.final_layernorm."
    return tuple(
        Row(f"{stack}.final_norm.{word}", ("hidden",), stage=stage, when=when,
            hf=hf + word,
            core=core + word,
            legacy=f"language_model.{stack}.final_norm.{word}")
        for word, when in (("weight", "final_norm"), ("bias", "final_norm norm_bias"))
    )  # fmt: skip


_DECODER = "decoder.layers.{l}."
_LEGACY = "language_model." + _DECODER
_HF_CROSS = "decoder.block.{l}.layer.1."

_CORE_HEAD = ("lm_head.output_layer.weight", "output_layer.weight")
"""Two names of one tensor."""

EMBEDDINGS = (
    Row("embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
        hf="shared.weight",
        core="embedding.word_embeddings.weight",
        legacy="language_model.embedding.word_embeddings.weight",
        copies=(Copied("head", {"hf": ("lm_head.weight",), "core": _CORE_HEAD, "legacy": ("word_embeddings_for_head.weight",)}),
                Copied("itself", {"hf": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")}),
                Copied("decoder"))),
    Row("positions.weight", ("max_positions hidden",), stage="first", when="learned",
        hf="position_embeddings.weight",
        core="embedding.position_embeddings.weight",
        legacy="language_model.embedding.position_embeddings.weight",
        copies=(Copied("itself", {"core": ("position_embeddings.weight",)}), Copied("decoder"))),
)  # fmt: skip

CROSS_ATTENTION = (
    *_norm("decoder", "cross_norm", "1", "pre_cross_attn_layernorm.", "pre_cross_attn_layernorm", "post_attention_norm"),
    Row(_DECODER + "cross.q.weight", (f"{_HEADS} hidden",), tp=0,
        hf=_HF_CROSS + "EncDecAttention.q.weight",
        core=_DECODER + "cross_attention.linear_q.weight",
        legacy=_LEGACY + "inter_attention.query.weight"),
    Row(_DECODER + "cross.q.bias", (_HEADS,), tp=0, when="qkv_bias",
        hf=_HF_CROSS + "EncDecAttention.q.bias",
        core=_DECODER + "cross_attention.linear_q.bias",
        legacy=_LEGACY + "inter_attention.query.bias"),
    Row(_DECODER + "cross.{k|v}.weight", (f"{_HEADS} hidden",) * 2, tp=0,
        hf=_HF_CROSS + "EncDecAttention.{k|v}.weight",
        core=Fused(_DECODER + "cross_attention.linear_kv.weight", groups="kv_heads"),
        legacy=Fused(_LEGACY + "inter_attention.key_value.weight", groups="kv_heads")),
    Row(_DECODER + "cross.{k|v}.bias", (_HEADS,) * 2, tp=0, when="qkv_bias",
        hf=_HF_CROSS + "EncDecAttention.{k|v}.bias",
        core=Fused(_DECODER + "cross_attention.linear_kv.bias", groups="kv_heads"),
        legacy=Fused(_LEGACY + "inter_attention.key_value.bias", groups="kv_heads")),
    Row(_DECODER + "cross.o.weight", (f"hidden {_HEADS}",), tp=1,
        hf=_HF_CROSS + "EncDecAttention.o.weight",
        core=_DECODER + "cross_attention.linear_proj.weight",
        legacy=_LEGACY + "inter_attention.dense.weight"),
    Row(_DECODER + "cross.o.bias", ("hidden",), when="o_bias",
        hf=_HF_CROSS + "EncDecAttention.o.bias",
        core=_DECODER + "cross_attention.linear_proj.bias",
        legacy=_LEGACY + "inter_attention.dense.bias"),
)  # fmt: skip

HEAD = (
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        core="lm_head.output_layer.weight",
        legacy="language_model.output_layer.weight",
        copies=(Copied("itself", {"core": ("output_layer.weight",)}), Copied("encoder_end"))),
    Row("head.bias", ("vocab",), tp=0, stage="last", when="head_bias", padded_vocab=True,
        hf="lm_head.bias",
        core="lm_head.output_layer.bias",
        legacy="lm_head.bias",
        copies=(Copied("itself", {"core": ("output_layer.bias",)}), Copied("encoder_end"))),
)  # fmt: skip

_RELATIVE = (_relative_bias("encoder", "between"), _relative_bias("decoder", "last"))
ROWS = (
    *EMBEDDINGS,
    *_RELATIVE,
    *_attention("encoder"),
    *_mlp("encoder", 1, "post_attention_norm"),
    *_final_norm("encoder", "between"),
    *_attention("decoder"),
    *CROSS_ATTENTION,
    *_mlp("decoder", 2, "post_inter_attention_norm"),
    *_final_norm("decoder", "last"),
    *HEAD,
)
IGNORED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
"""An additional table in the first files, which is unused."""

_KIND = "feed_forward_proj"
_ACTIVATIONS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}
"""feed_forward_proj -> (activation, True if there is a gate)."""


_DERIVED = {"gated-gelu": ("gelu_new", True)}
"""feed_forward_proj -> (dense_act_fn, is_gated_act), if its own words don't say it."""


def _read_activation(raw: Raw) -> Fields:
    """The activation. transformers' class lets the two derived keys win, which have to agree with feed_forward_proj."""
    kind = raw.get(_KIND, "relu")
    if kind not in _ACTIVATIONS:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_KIND} {kind!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    activation, is_gated = _ACTIVATIONS[kind]
    derived = _DERIVED.get(kind, (activation, is_gated))
    for key, expected in zip(("dense_act_fn", "is_gated_act"), derived, strict=True):
        if raw.get(key, expected) != expected:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} is {raw[key]!r:.40}, but {_KIND} {kind!r} makes it {expected!r}; correct it, or leave it out"
            )
    return {"mlp.activation": activation, "mlp.gated": is_gated}


def _write_activation(config: ModelConfig) -> Raw:
    words = {found: word for word, found in _ACTIVATIONS.items()}
    found = (config.mlp.activation, config.mlp.gated)
    if found not in words:
        raise NotExpressible(
            f"the model has {'a gated' if config.mlp.gated else 'an ungated'} {config.mlp.activation}, which "
            f"T5ForConditionalGeneration doesn't support; it supports {', '.join(_ACTIVATIONS)}"
        )
    return {_KIND: words[found]}


def _unscaled(config: ModelConfig) -> Raw:
    if config.attention.scale != FIXED["attention.scale"]:
        raise NotExpressible(
            "the model's attention scores are divided by the square root of the head size, as all of Megatron's are; "
            "T5ForConditionalGeneration's aren't"
        )
    return {}


def _read_layers(raw: Raw) -> Fields:
    encoder = need_size(raw, "num_layers")
    return {
        "encoder.layers": encoder,
        "layers.count": need_size(raw, "num_decoder_layers", encoder),
    }


def _read_heads(raw: Raw) -> Fields:
    heads = need_size(raw, "num_heads")
    return {
        "attention.heads": heads,
        "attention.kv_heads": heads,
        "attention.head_dim": need_size(raw, "d_kv"),
    }


TIED, SCALED = "tie_word_embeddings", "scale_decoder_outputs"


def _read_head(raw: Raw) -> Fields:
    """The head as config.json describes it. If outputs are scaled, they are divided by the root of the hidden size.

    transformers 5 writes tie_word_embeddings true for each T5: scale_decoder_outputs tells T5 and T5 1.1 apart.
    """
    tied = need_flag(raw, TIED, True)
    scaled = need_flag(raw, SCALED, tied)
    if scaled and not tied:
        raise NotExpressible(
            f"{CONFIG_NAME}: {SCALED} true with {TIED} false is not supported: T5's outputs are scaled if its head is tied, and "
            "only then; correct one of them"
        )
    divisor = need_size(raw, "d_model") ** 0.5 if scaled else None
    return {"tie_embeddings": tied, "head.divisor": divisor}


def _write_head(config: ModelConfig) -> Raw:
    """The head. Only transformers 5 knows the key for a tied head without a scale."""
    if config.tie_embeddings and config.head.divisor is None:
        return {TIED: True, SCALED: False}
    return {TIED: config.tie_embeddings}


def _with_stored_head(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set by the tensors whether a T5 1.1 has a head of its own. Files of transformers 5 say that all heads are tied."""
    is_own = config.head.divisor is None and "lm_head.weight" in names
    return replace(config, tie_embeddings=False) if is_own else config


FIXED = {"positions.kind": "relative", "attention.scale": 1.0}

KEYS = (
    Keys((), lambda raw: {}, _unscaled),
    size("d_model", "hidden"),
    size("d_ff", "mlp.ffn"),
    size("n_positions", "max_positions", 512),
    Keys(
        ("num_layers", "num_decoder_layers"),
        _read_layers,
        lambda config: {
            "num_layers": config.encoder.layers,
            "num_decoder_layers": config.layer_count,
        },
    ),
    Keys(
        ("num_heads", "d_kv"),
        _read_heads,
        lambda config: {"num_heads": config.attention.heads, "d_kv": config.attention.head_dim},
    ),
    number("layer_norm_epsilon", "norm.epsilon", 1e-6),
    size("relative_attention_num_buckets", "positions.buckets", 32),
    size("relative_attention_max_distance", "positions.max_distance", 128),
    Keys((_KIND, "dense_act_fn", "is_gated_act"), _read_activation, _write_activation),
    *without_keys(model_keys(tied=True, tokens=(None, 1, 0)), TIED),
    Keys((TIED, SCALED), _read_head, _write_head),
    Keys(
        ("decoder_start_token_id",),
        lambda raw: {},
        lambda config: {"decoder_start_token_id": config.pad_token_id},
    ),
)

ONLY = {"is_encoder_decoder": True, "is_decoder": False}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}

FAMILY = Family(
    name="t5",
    architectures=("T5ForConditionalGeneration",),
    model_type="t5",
    rows=ROWS,
    keys=KEYS,
    fixed=FIXED,
    only=ONLY,
    ignored=IGNORED,
    complete=_with_stored_head,
    recognized="encoder",
    aliases=ALIASES,
)
