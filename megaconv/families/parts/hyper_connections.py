"""Hyper-connections: several residual streams, which each sublayer mixes (DeepSeek V4), or reads and adds to (Hunyuan V4).

    hf           layers.{l}.{hc_attn_fn, hc_attn_base, hc_attn_scale, hc_ffn_fn ...}, hc_head_fn
    hf_stacked   model.layers.{l}.{attn_hc, ffn_hc}.{fn, base, scale}, model.hc_head.hc_fn

`fn` projects all streams of a token to the weights that mix them, `base` is added, and each kind of weight has a scale.
Source: DeepseekV4HyperConnection and DeepseekV4HyperHead of transformers 5.23.
"""

from megaconv.families.parts.keys import number, size
from megaconv.model.table import Row

_MIX, _HEAD = "hyper_weights", "hyper_streams"
_STREAMS = "hyper_streams*hidden"
_PLACES = ("layers.{l}.hyper.attn", "layers.{l}.hyper.mlp", "hyper.head")
Prefixes = tuple[str, str, str]


def hyper_connections(
    names: Prefixes, scales: int, of_class: Prefixes | None = None
) -> tuple[Row, ...]:
    """The rows of hyper-connections.

    names: prefixes of Hugging Face's names: of those around attention, around MLPs, and before the head.
    scales: the number of kinds of weights around attention and MLPs. of_class: prefixes of the names of transformers' class.
    """
    found: list[Row] = []
    for place, names_here, names_of_class in zip(_PLACES, names, of_class or names, strict=True):
        width, kinds, stage = (
            (_HEAD, 1, "last") if place == "hyper.head" else (_MIX, scales, "layer")
        )
        tensors = {"fn": (f"{width} {_STREAMS}",), "{base|scale}": (width, str(kinds))}
        for tensor, shapes in tensors.items():
            found.append(
                Row(f"{place}.{tensor}", shapes, stage=stage, when="hyper_connections",
                    hf=names_here + tensor, hf_stacked=names_of_class + tensor)
            )  # fmt: skip
    return tuple(found)


HYPER_CONNECTIONS = hyper_connections(
    ("layers.{l}.hc_attn_", "layers.{l}.hc_ffn_", "hc_head_"),
    scales=3,
    of_class=("model.layers.{l}.attn_hc.", "model.layers.{l}.ffn_hc.", "model.hc_head.hc_"),
)
"""The rows of DeepSeek V4."""
HYPER_KEYS = (
    size("hc_mult", "hyper.streams", 4),
    size("hc_sinkhorn_iters", "hyper.iterations", 20),
    number("hc_eps", "hyper.epsilon", 1e-6),
)
"""Their keys, with the defaults of DeepseekV4Config."""
