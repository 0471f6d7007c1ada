"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored as [in, out], head tied to the embedding."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.hf_config import read_hf_common, refuse
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, Row, Transposed

_HF = "transformer.h.{l}."
_CORE = "decoder.layers.{l}."
_LEGACY = "language_model.encoder.layers.{l}."
_HEADS = "heads*head_dim"

ROWS = (
    Row("embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
        hf="transformer.wte.weight",
        core="embedding.word_embeddings.weight",
        legacy="language_model.embedding.word_embeddings.weight",
        copies=(Copied("head", {"hf": ("lm_head.weight",), "core": ("output_layer.weight",),
                                "legacy": ("word_embeddings_for_head.weight",)}),)),
    Row("positions.weight", ("max_positions hidden",), stage="first",
        hf="transformer.wpe.weight",
        core="embedding.position_embeddings.weight",
        legacy="language_model.embedding.position_embeddings.weight"),
    Row("layers.{l}.input_norm.{weight|bias}", ("hidden", "hidden"),
        hf=_HF + "ln_1.{weight|bias}",
        core=_CORE + "self_attention.linear_qkv.layer_norm_{weight|bias}",
        core_local=_CORE + "input_layernorm.{weight|bias}",
        legacy=_LEGACY + "input_norm.{weight|bias}"),
    Row("layers.{l}.attn.{q|k|v}.weight", (f"{_HEADS} hidden",) * 3, tp=0,
        hf=Transposed(_HF + "attn.c_attn.weight"),
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.weight", groups="kv_heads")),
    Row("layers.{l}.attn.{q|k|v}.bias", (_HEADS,) * 3, tp=0,
        hf=Fused(_HF + "attn.c_attn.bias"),
        core=Fused(_CORE + "self_attention.linear_qkv.bias", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.bias", groups="kv_heads")),
    Row("layers.{l}.attn.o.weight", (f"hidden {_HEADS}",), tp=1,
        hf=Transposed(_HF + "attn.c_proj.weight"),
        core=_CORE + "self_attention.linear_proj.weight",
        legacy=_LEGACY + "self_attention.dense.weight"),
    Row("layers.{l}.attn.o.bias", ("hidden",),
        hf=_HF + "attn.c_proj.bias",
        core=_CORE + "self_attention.linear_proj.bias",
        legacy=_LEGACY + "self_attention.dense.bias"),
    Row("layers.{l}.mlp_norm.{weight|bias}", ("hidden", "hidden"),
        hf=_HF + "ln_2.{weight|bias}",
        core=_CORE + "mlp.linear_fc1.layer_norm_{weight|bias}",
        core_local=_CORE + "pre_mlp_layernorm.{weight|bias}",
        legacy=_LEGACY + "post_attention_norm.{weight|bias}"),
    Row("layers.{l}.mlp.up.weight", ("ffn hidden",), tp=0,
        hf=Transposed(_HF + "mlp.c_fc.weight"),
        core=_CORE + "mlp.linear_fc1.weight",
        legacy=_LEGACY + "mlp.dense_h_to_4h.weight"),
    Row("layers.{l}.mlp.up.bias", ("ffn",), tp=0,
        hf=_HF + "mlp.c_fc.bias",
        core=_CORE + "mlp.linear_fc1.bias",
        legacy=_LEGACY + "mlp.dense_h_to_4h.bias"),
    Row("layers.{l}.mlp.down.weight", ("hidden ffn",), tp=1,
        hf=Transposed(_HF + "mlp.c_proj.weight"),
        core=_CORE + "mlp.linear_fc2.weight",
        legacy=_LEGACY + "mlp.dense_4h_to_h.weight"),
    Row("layers.{l}.mlp.down.bias", ("hidden",),
        hf=_HF + "mlp.c_proj.bias",
        core=_CORE + "mlp.linear_fc2.bias",
        legacy=_LEGACY + "mlp.dense_4h_to_h.bias"),
    Row("final_norm.{weight|bias}", ("hidden", "hidden"), stage="last",
        hf="transformer.ln_f.{weight|bias}",
        core="decoder.final_layernorm.{weight|bias}",
        legacy="language_model.encoder.final_norm.{weight|bias}"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        core="output_layer.weight",
        legacy="language_model.output_layer.weight"),
)  # fmt: skip
IGNORED = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
"""Older files keep the causal mask."""

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = raw["n_embd"], raw["n_head"]
    activation = raw.get("activation_function", "gelu_new")
    unusual = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False}
    if activation not in _ACTIVATIONS or any(raw.get(name, usual) != usual for name, usual in unusual.items()):
        raise NotExpressible(
            f"config.json: activation {activation!r} or one of {', '.join(unusual)} is not GPT-2's own; only that is known"
        )
    return ModelConfig(
        family="gpt2",
        layers=raw["n_layer"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=raw.get("n_inner") or 4 * hidden,
        max_positions=raw["n_positions"],
        norm_epsilon=raw.get("layer_norm_epsilon", 1e-5),
        rope_theta=10000.0,
        positions="learned",
        normalization="LayerNorm",
        activation=_ACTIVATIONS[activation],
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        **read_hf_common({"bos_token_id": 50256, "eos_token_id": 50256, **raw}, tied=True) | {"hf": dict(raw)},
    )


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(config, "GPT2LMHeadModel", qk_norm="q and k norms", sliding_window="a sliding window", experts="experts")
    if config.kv_heads != config.heads or config.head_dim * config.heads != config.hidden:
        raise NotExpressible(
            "GPT2LMHeadModel has no place for grouped queries, or heads that don't add up to the hidden size"
        )
    eos = config.eos_token_id
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": None if config.ffn == 4 * config.hidden else config.ffn,
        "n_layer": config.layers,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "vocab_size": config.vocab,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
    }


FAMILY = Family("gpt2", ("GPT2LMHeadModel",), "gpt2", ROWS, read_hf, write_hf, IGNORED, prefix="transformer.")
