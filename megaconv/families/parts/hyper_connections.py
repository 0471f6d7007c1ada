"""Hyper-connections: several residual streams, which each sublayer mixes (DeepSeek V4).

    hf           layers.{l}.{hc_attn_fn, hc_attn_base, hc_attn_scale, hc_ffn_fn ...}, hc_head_fn
    hf_stacked   model.layers.{l}.{attn_hc, ffn_hc}.{fn, base, scale}, model.hc_head.hc_fn

`fn` projects all streams of a token to the weights that mix them, `base` is added, and each kind of weight has a scale.
Source: DeepseekV4HyperConnection and DeepseekV4HyperHead of transformers 5.23.
"""

from megaconv.families.parts.keys import number, size
from megaconv.model.table import Row

_HF, _CLASS = "layers.{l}.", "model.layers.{l}."
_MIX, _HEAD = "hyper_weights", "hyper_streams"
_STREAMS = "hyper_streams*hidden"

HYPER_CONNECTIONS = (
    Row("layers.{l}.hyper.attn.fn", (f"{_MIX} {_STREAMS}",), when="hyper_connections",
        hf=_HF + "hc_attn_fn",
        hf_stacked=_CLASS + "attn_hc.fn"),
    Row("layers.{l}.hyper.attn.{base|scale}", (_MIX, "3"), when="hyper_connections",
        hf=_HF + "hc_attn_{base|scale}",
        hf_stacked=_CLASS + "attn_hc.{base|scale}"),
    Row("layers.{l}.hyper.mlp.fn", (f"{_MIX} {_STREAMS}",), when="hyper_connections",
        hf=_HF + "hc_ffn_fn",
        hf_stacked=_CLASS + "ffn_hc.fn"),
    Row("layers.{l}.hyper.mlp.{base|scale}", (_MIX, "3"), when="hyper_connections",
        hf=_HF + "hc_ffn_{base|scale}",
        hf_stacked=_CLASS + "ffn_hc.{base|scale}"),
    Row("hyper.head.fn", (f"{_HEAD} {_STREAMS}",), stage="last", when="hyper_connections",
        hf="hc_head_fn",
        hf_stacked="model.hc_head.hc_fn"),
    Row("hyper.head.{base|scale}", (_HEAD, "1"), stage="last", when="hyper_connections",
        hf="hc_head_{base|scale}",
        hf_stacked="model.hc_head.{hc_base|hc_scale}"),
)  # fmt: skip
HYPER_KEYS = (
    size("hc_mult", "hyper.streams", 4),
    size("hc_sinkhorn_iters", "hyper.iterations", 20),
    number("hc_eps", "hyper.epsilon", 1e-6),
)
"""Their keys, with the defaults of DeepseekV4Config."""
