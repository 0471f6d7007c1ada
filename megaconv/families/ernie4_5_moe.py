"""ERNIE 4.5 with experts: a bias takes part in their choice as DeepSeek's does, and scores are softmax's, not sigmoid's.

Megatron core has that bias for sigmoid scores alone, so no model of its own computes this one: names and bytes are what
is converted, and `notices` says so.
"""

from megaconv.families import Family
from megaconv.families.glm4_moe import ROUTER_BIAS, UNPREDICTING
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys, rope
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.expert_keys import routed_experts, shared_experts
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, other_names
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Transposed

# [1, experts] in the files, where Megatron has a vector.
_BIAS = {
    "hf": Transposed("model.layers.{l}.mlp.moe_statics.e_score_correction_bias"),
    "hf_stacked": Transposed("model.layers.{l}.mlp.gate.moe_statics.e_score_correction_bias"),
}
ROWS = in_core(respelled(UNPREDICTING, {ROUTER_BIAS.canonical: _BIAS}))


def _read_layers(raw: Raw) -> Fields:
    layers, step = need_size(raw, "num_hidden_layers"), need_size(raw, "moe_layer_interval", 1)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    end = layers if last == -1 else min(layers, last + 1)
    chosen = [layer for layer in range(first, end) if (layer + 1) % step == 0]
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _write_layers(config: ModelConfig) -> Raw:
    chosen = config.layers_with("moe") or (config.layer_count,)
    return {"moe_layer_start_index": chosen[0], "moe_layer_end_index": chosen[-1], "moe_layer_interval": 1}


_KEYS = (
    other_names({"num_experts_per_tok": "moe_k"}),
    *decoder_keys(positions=131072, kv_heads=4, epsilon=1e-5, rotation=rope(5e5), tied=True, tokens=(1, 2, 0)),
    *routed_experts(count=64, per_token=6, width=1536, count_key="moe_num_experts", per_token_key="moe_k"),
    shared_experts(count=2, width=1536, key="moe_num_shared_experts"),
    Keys(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _read_layers, _write_layers),
)


def _notices(config: ModelConfig) -> tuple[str, ...]:
    return (
        "a bias takes part in the choice of experts, whose scores are a softmax's: Megatron core has such a bias for sigmoid "
        "scores alone and refuses these arguments; names and values are right, the model needs a router of its own",
    )


FAMILY = Family(
    "ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), "ernie4_5_moe", ROWS, keys=_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True, "experts.router_bias": True},
    only={**SILU, "use_bias": False, "moe_norm_min": 1e-12}, ignored=IGNORED, left_out=MTP_LEFT_OUT,
    recognized=f"{MIXTURE.replace('!interleaved', 'interleaved')} !sigmoid_router router_bias", notices=_notices,
    proven="names",
)  # fmt: skip
