"""MiniMax M2: Mixtral's keys, experts with sigmoid routing and a bias, norms of q and k over all heads; FP8 as shipped.

Megatron core has no modules for these norms; Megatron-Bridge's MiniMax M2 has them. None of transformers' files holds
MTP layers.
"""

from megaconv.families import Family
from megaconv.families.mixtral import ROWS as MIXTRAL_ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import ROUTER_BIAS, SIGMOID_ROUTER
from megaconv.families.parts.experts import EXPERTS_WIDTH
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
from megaconv.families.parts.norm_places import normed_over_all_heads
from megaconv.families.parts.rope import rope, rotary_percent
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig

_BIAS = ROUTER_BIAS.renamed(hf="model.layers.{l}.block_sparse_moe.e_score_correction_bias")
ROWS = in_core((*normed_over_all_heads(MIXTRAL_ROWS), _BIAS))


def _read_rotation(raw: Raw) -> Fields:
    """The rotating share of a head: rotary_dim gives it if partial_rotary_factor is missing."""
    width = need_size(raw, "head_dim", 128)
    return {
        "positions.rotary_percent": rotary_percent(raw, need_size(raw, "rotary_dim", width) / width)
    }


def _write_rotation(config: ModelConfig) -> Raw:
    part = config.positions.rotary_percent
    return {"rotary_dim": round(part * config.attention.head_dim), "partial_rotary_factor": part}


_ROTATION = Keys(("rotary_dim", "partial_rotary_factor"), _read_rotation, _write_rotation)
_KEYS = (
    *decoder_keys(
        positions=196608,
        kv_heads=8,
        head_dim=128,
        rotation=rope(5e6),
        partial=_ROTATION,
        tokens=(200034, 200020, None),
    ),
    EXPERTS_WIDTH,
    size("num_local_experts", "experts.count", 256),
    size("num_experts_per_tok", "experts.per_token", 8),
)
_FIXED = {"attention.qk_norm": True, "attention.qk_norm_width": "all", "layers.mlp": "experts"}
_ONLY = {
    **SILU,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
}

FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **_FIXED},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{MIXTURE} sigmoid_router !shared_ffn wide_qk_norm",
    proven="custom module",
    aliases={"num_experts": "num_local_experts"},
)
