"""MiniCPM 3: a dense model with latent attention, and factors on embedding, residual branches and logits.

Megatron core has no such factors: these models are converted between Hugging Face's files, and trained.
"""

from dataclasses import replace
from math import inf, nextafter

from megaconv.families.parts.decoder_keys import (
    GATED_SILU,
    HEADS_DIVIDE_HIDDEN,
    LLAMA_LIKE,
    body_keys,
)
from megaconv.families.parts.keys import Fields, Keys, Raw, need_number, need_size
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads
from megaconv.families.youtu import FAMILY as YOUTU
from megaconv.model.config import ModelConfig

_EMBEDDING, _DEPTH, _BASE, _VALUES = "scale_emb", "scale_depth", "dim_model_base", "v_head_dim"
_HEADS = latent_heads(kv_rank=256, q_rank=768, rope=32, nope=64, v=64)


def _read_heads(raw: Raw) -> Fields:
    """Without a width of values, it is hidden_size / heads."""
    usual = need_size(raw, "hidden_size") // need_size(raw, "num_attention_heads")
    stated = raw.get(_VALUES)
    return _HEADS.read({**raw, _VALUES: usual if stated is None else stated})


def _read_factors(raw: Raw) -> Fields:
    embedding = need_number(raw, _EMBEDDING, 12)
    hidden, layers = need_size(raw, "hidden_size"), need_size(raw, "num_hidden_layers")
    depth, base = raw.get(_DEPTH, 1.4), raw.get(_BASE, 256)
    residual = 1.0 if depth is None else need_number({_DEPTH: depth}, _DEPTH, 1.4) / layers**0.5
    divisor = 1.0 if base is None else hidden / need_size({_BASE: base}, _BASE)
    return {
        "embedding_scale": None if embedding == 1 else embedding,
        "residual_scale": None if residual == 1 else residual,
        "head.divisor": None if divisor == 1 else divisor,
    }


def _depth(residual: float, layers: int) -> float:
    """The key's value for a factor. Rounding may put it next to the product."""
    near = residual * layers**0.5
    candidates = (round(near, 12), near, nextafter(near, inf), nextafter(near, -inf))
    return next((each for each in candidates if each / layers**0.5 == residual), near)


def _write_factors(config: ModelConfig) -> Raw:
    residual, divisor = config.residual_scale, config.head.divisor
    depth = None if residual is None else _depth(residual, config.layer_count)
    base = None if divisor is None else round(config.hidden / divisor)
    return {_EMBEDDING: config.embedding_scale or 1, _DEPTH: depth, _BASE: base}


_KEYS = (
    *body_keys(positions=32768, epsilon=1e-5, tied=True, tokens=(1, 2, None)),
    GATED_SILU,
    Keys(_HEADS.names, _read_heads, _HEADS.write),
    Keys((_EMBEDDING, _DEPTH, _BASE), _read_factors, _write_factors),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = replace(
    YOUTU, name="minicpm3", architectures=("MiniCPM3ForCausalLM",), model_type="minicpm3", keys=_KEYS,
    fixed={**LLAMA_LIKE, **LATENT_NORMS, "latent.halves": True}, only={"attention_bias": False, "mlp_bias": False},
    recognized=None, proven="names",
)  # fmt: skip
