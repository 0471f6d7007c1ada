"""Arcee's Trinity (AFMoE): norms before and after sublayers, gated attention, experts with a sigmoid router.

Layers without a window don't rotate. Megatron core has no norm after sublayers beside experts: these models are converted
between Hugging Face's files, and trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
)
from megaconv.families.parts.delta_net import GATED_ATTENTION
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, number
from megaconv.families.parts.norm_places import (
    no_norm_after_experts,
    norms_at,
    output_norms_by_mlp,
)
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.families.parts.windows import rotating_windows, windows_by_layer
from megaconv.model.config import ModelConfig

_LAYER = "model.layers.{l}."
_ROUTER = _LAYER + "mlp.router.gate.weight"
_BIAS = _LAYER + "mlp.expert_bias"
_NAMES = {
    "layers.{l}.attn.{q|gate|k|v}.weight": {
        "hf": _LAYER + "self_attn.{q_proj|gate_proj|k_proj|v_proj}.weight"
    },
    "layers.{l}.mlp.router.weight": {"hf": _ROUTER, "hf_stacked": _ROUTER},
    ROUTER_BIAS.canonical: {"hf": _BIAS, "hf_stacked": _BIAS},
}
_LAYERS = norms_at(
    GATED_ATTENTION,
    DEEPSEEK_MLPS,
    before=("input_layernorm", "pre_mlp_layernorm"),
    after=("post_attention_layernorm", "post_mlp_layernorm"),
)
ROWS = in_core(respelled(output_norms_by_mlp((EMBEDDING, *_LAYERS, *HEAD)), _NAMES))

_MUP = "mup_enabled"


def _read_mup(raw: Raw) -> Fields:
    """The factor on the embedding's output: the root of hidden_size, or none."""
    scale = need_size(raw, "hidden_size") ** 0.5
    return {"embedding_scale": scale if raw.get(_MUP) else None}


def _write_mup(config: ModelConfig) -> Raw:
    return {_MUP: config.embedding_scale is not None}


_KEYS = (
    *decoder_keys(positions=16384, head_dim=128, epsilon=1e-5),
    *routed_experts(count=64, per_token=6, width=1408, count_key="num_experts"),
    shared_experts(count=2, width=1408, key="num_shared_experts"),
    first_dense(1, key="num_dense_layers"),
    number("route_scale", "experts.scale", 1.0),
    rotating_windows(windows_by_layer(1024, full_every=4, pattern=("global_attn_every_n_layers",))),
    Keys((_MUP,), _read_mup, _write_mup),
)
_ONE_GROUP = dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1)
_ONLY = {
    **SILU,
    **_ONE_GROUP,
    "attention_bias": False,
    "score_func": "sigmoid",
    "route_norm": True,
}
"""transformers' class knows only the first and attention_bias. Published files have all of them."""
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    "attention.qk_norm": True,
    "attention.output_gate": True,
    "norm.place": "both",
}

FAMILY = Family(
    name="afmoe",
    architectures=("AfmoeForCausalLM",),
    model_type="afmoe",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm", "output_gate"),
    recognized=None,
    proven="names",
    notices=no_norm_after_experts,
)
