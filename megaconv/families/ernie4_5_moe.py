"""ERNIE 4.5 with experts: a bias affects their selection as in DeepSeek, but scores come from softmax instead of
sigmoid.

Megatron core supports that bias only for sigmoid scores, so none of its models computes this one. megaconv converts
names and bytes, and `notices` says so.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    ROUTER_BIAS,
    routed_experts,
    shared_experts,
)
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Transposed

# The files store [1, experts], and Megatron stores a vector.
_BIAS = {
    "hf": Transposed("model.layers.{l}.mlp.moe_statics.e_score_correction_bias"),
    "hf_stacked": Transposed("model.layers.{l}.mlp.gate.moe_statics.e_score_correction_bias"),
}
ROWS = in_core(respelled(MIXTURE_ROWS, {ROUTER_BIAS.canonical: _BIAS}))


def _read_layers(raw: Raw) -> Fields:
    layers, step = need_size(raw, "num_hidden_layers"), need_size(raw, "moe_layer_interval", 1)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    end = layers if last == -1 else min(layers, last + 1)
    chosen = [layer for layer in range(first, end) if (layer + 1) % step == 0]
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _write_layers(config: ModelConfig) -> Raw:
    chosen = config.layers_with("moe") or (config.layer_count,)
    return {
        "moe_layer_start_index": chosen[0],
        "moe_layer_end_index": chosen[-1],
        "moe_layer_interval": 1,
    }


_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=4, epsilon=1e-5, rotation=rope(5e5), tied=True, tokens=(1, 2, 0)
    ),
    *routed_experts(
        count=64, per_token=6, width=1536, count_key="moe_num_experts", per_token_key="moe_k"
    ),
    shared_experts(count=2, width=1536, key="moe_num_shared_experts"),
    Keys(
        ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        _read_layers,
        _write_layers,
    ),
)


def _notices(config: ModelConfig) -> tuple[str, ...]:
    return (
        "the router adds a bias to softmax scores. Megatron core supports this bias only with sigmoid "
        "scores and refuses these arguments. Names and values are right, but the model needs its own router module",
    )


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_type="ernie4_5_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True, "experts.router_bias": True},
    only={**SILU, "use_bias": False, "moe_norm_min": 1e-12},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    recognized=f"{MIXTURE.replace('!interleaved', 'interleaved')} !sigmoid_router router_bias",
    notices=_notices,
    proven="names",
)
