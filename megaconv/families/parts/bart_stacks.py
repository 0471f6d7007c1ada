"""An encoder and a decoder as BART has them: the rows of both stacks, and the keys of config.json.

    model.shared                                                                  the embedding, and the head
    model.{encoder|decoder}.{embed_positions, layernorm_embedding, layer_norm}    each optional
    model.{encoder|decoder}.layers.{l}.{self_attn, self_attn_layer_norm, fc1, fc2, final_layer_norm}
    model.decoder.layers.{l}.{encoder_attn, encoder_attn_layer_norm}
    final_logits_bias [1, vocab]                                                  a bias of the head

Each norm follows a residual sum in some architectures, and comes before its sublayer in the others. All matrices have biases.
Megatron's T5 has norms before sublayers, none after the embedding, and one table of positions for both stacks.
"""

from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.decoder_keys import ALL_BIASES, GELUS, Tokens, model_keys
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_flag,
    need_size,
    size,
)
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.table import Copied, Row

_STACKS = {"encoder": "encoder", "decoder": "layer"}
_HEAD, _TABLES = "lm_head.weight", ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")  # fmt: skip


def _norm(canonical: str, hf: str, stage: str, when: str | None = None) -> Row:
    return Row(f"{canonical}.{{weight|bias}}", ("hidden", "hidden"), stage=stage, when=when, hf=f"{hf}.{{weight|bias}}")  # fmt: skip


def _attention(own: str, hf: str, stage: str) -> tuple[Row, ...]:
    """The rows of one attention. own, hf: the beginnings of the names."""
    return (
        Row(own + ".{q|k|v}.weight", ("hidden hidden",) * 3, tp=0, stage=stage, hf=hf + ".{q|k|v}_proj.weight"),
        Row(own + ".{q|k|v}.bias", ("hidden",) * 3, tp=0, stage=stage, hf=hf + ".{q|k|v}_proj.bias"),
        Row(own + ".o.weight", ("hidden hidden",), tp=1, stage=stage, hf=hf + ".out_proj.weight"),
        Row(own + ".o.bias", ("hidden",), stage=stage, hf=hf + ".out_proj.bias"),
    )  # fmt: skip


def _layers(stack: str, ffn: str) -> tuple[Row, ...]:
    """The rows of a stack's layers. ffn: the size of its MLPs."""
    stage, own = _STACKS[stack], f"{stack}.layers.{{l}}."
    hf = f"model.{own}"
    crosses = (
        *_attention(own + "cross", hf + "encoder_attn", stage),
        _norm(own + "cross_norm", hf + "encoder_attn_layer_norm", stage),
    )
    return (
        *_attention(own + "attn", hf + "self_attn", stage),
        _norm(own + "attn_norm", hf + "self_attn_layer_norm", stage),
        *(crosses if stack == "decoder" else ()),
        Row(own + "mlp.up.weight", (f"{ffn} hidden",), tp=0, stage=stage, hf=hf + "fc1.weight"),
        Row(own + "mlp.up.bias", (ffn,), tp=0, stage=stage, hf=hf + "fc1.bias"),
        Row(own + "mlp.down.weight", (f"hidden {ffn}",), tp=1, stage=stage, hf=hf + "fc2.weight"),
        Row(own + "mlp.down.bias", ("hidden",), stage=stage, hf=hf + "fc2.bias"),
        _norm(own + "mlp_norm", hf + "final_layer_norm", stage),
    )


def _around(stack: str, first: str, last: str) -> tuple[Row, ...]:
    """The rows before and after a stack's layers. first, last: their stages."""
    hf = f"model.{stack}."
    positions = Row(
        f"{stack}.positions.weight",
        ("position_rows hidden",),
        stage=first,
        hf=hf + "embed_positions.weight",
    )
    return (
        replace(positions, when="learned"),
        replace(positions, when="stored_positions"),
        _norm(f"{stack}.embed_norm", hf + "layernorm_embedding", first, "embedding_norm"),
        _norm(f"{stack}.final_norm", hf + "layer_norm", last, "final_norm"),
    )  # fmt: skip


_EMBEDDING = Row(
    "embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
    hf="model.shared.weight",
    copies=(Copied("head", {"hf": (_HEAD,)}), Copied("itself", {"hf": _TABLES})),
)  # fmt: skip
_BIAS = Row("head.bias", ("1 vocab",), stage="last", when="head_bias", hf="final_logits_bias")
BART_ROWS = hf_only(
    (
        _EMBEDDING,
        *_around("encoder", "first", "between"),
        *_layers("encoder", "encoder_ffn"),
        *_around("decoder", "between", "last"),
        *_layers("decoder", "ffn"),
        _BIAS,
    )
)

_HEADS, _WIDTHS = "attention_heads", "ffn_dim"
_SCALES, _ACTIVATION, _START = "scale_embedding", "activation_function", "decoder_start_token_id"
_WORDS = {"relu": "relu", "silu": "silu", "swish": "silu", **GELUS}


def _of_both(raw: Raw, key: str, default: int) -> tuple[int, int]:
    """The values of a key for the encoder and for the decoder."""
    encoder, decoder = (need_size(raw, f"{stack}_{key}", default) for stack in _STACKS)
    return encoder, decoder


def _written(key: str, encoder: int, decoder: int) -> Raw:
    return {f"encoder_{key}": encoder or decoder, f"decoder_{key}": decoder}


def _read_heads(raw: Raw) -> Fields:
    hidden = need_size(raw, "d_model", 1024)
    encoder, decoder = _of_both(raw, _HEADS, 16)
    for stack, heads in zip(_STACKS, (encoder, decoder), strict=True):
        if hidden % heads:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {stack}_{_HEADS} {heads} doesn't divide d_model {hidden}"
            )
    return {
        "attention.heads": decoder,
        "attention.kv_heads": decoder,
        "attention.head_dim": hidden // decoder,
        "encoder.heads": 0 if encoder == decoder else encoder,
    }


def _read_widths(raw: Raw) -> Fields:
    encoder, decoder = _of_both(raw, _WIDTHS, 4096)
    return {"mlp.ffn": decoder, "encoder.ffn": 0 if encoder == decoder else encoder}


def _both(key: str) -> tuple[str, ...]:
    return tuple(f"{stack}_{key}" for stack in _STACKS)


def bart_keys(
    *, vocab: int, activation: str, scales: bool, tokens: Tokens, start: str = ""
) -> tuple[Keys, ...]:
    """The keys of both stacks. The arguments are the class's defaults:

    vocab        vocab_size
    activation   activation_function
    scales       scale_embedding
    tokens       bos_token_id, eos_token_id and pad_token_id
    start        the one of these with which generation begins (decoder_start_token_id); it is written to a new config.json
    """

    def read_scale(raw: Raw) -> Fields:
        is_scaled = need_flag(raw, _SCALES, scales)
        return {"embedding_scale": need_size(raw, "d_model", 1024) ** 0.5 if is_scaled else None}

    usual = without_keys(model_keys(tied=True, tokens=tokens), "tie_word_embeddings")
    return (
        size("d_model", "hidden", 1024),
        size("encoder_layers", "encoder.layers", 12),
        size("decoder_layers", "layers.count", 12),
        Keys(
            _both(_HEADS),
            _read_heads,
            lambda config: _written(_HEADS, config.encoder.heads, config.attention.heads),
        ),
        Keys(
            _both(_WIDTHS),
            _read_widths,
            lambda config: _written(_WIDTHS, config.encoder.ffn, config.mlp.ffn),
        ),
        size("max_position_embeddings", "max_positions", 1024),
        choice(_ACTIVATION, "mlp.activation", _WORDS, activation),
        Keys((_SCALES,), read_scale, _write_scale),
        *with_defaults(usual, {"vocab_size": vocab}),
        Keys((_START,), lambda raw: {}, lambda config: _written_start(config, start)),
    )


def _write_scale(config: ModelConfig) -> Raw:
    return {_SCALES: config.embedding_scale is not None}


def _written_start(config: ModelConfig, field: str) -> Raw:
    token = value_of(config, field) if field else None
    return {_START: token[0] if isinstance(token, tuple) else token}


BART_FIXED: dict[str, Any] = {
    **ALL_BIASES,
    "norm.kind": "LayerNorm",
    "norm.epsilon": 1e-5,
    "mlp.gated": False,
    "tie_embeddings": True,
}
BART_ONLY: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "tie_word_embeddings": True,
}
BART_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
BART_IGNORED = (r"model\.(en|de)coder\.version",)
"""Numbers of fairseq's format, which older files hold."""
COMPUTED_POSITIONS = (r"model\.(en|de)coder\.embed_positions\.weights?",)
"""Tables of sines, which older files hold. They follow from the configuration."""
