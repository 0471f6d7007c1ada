"""Aleph Alpha's Kolibri 1: norms before and after sublayers, windows with rope, experts in every layer; FP8 as shipped.

The router adds its bias to logits, not to their sigmoids. Megatron core has no such router, and no norm after experts:
these models are converted between Hugging Face's files, and trained.
"""

from megaconv.errors import UnknownFamily
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import DEEPSEEK_SHARED, ROUTER_BIAS, SIGMOID_ROUTER
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    follows,
    need_size,
    size,
)
from megaconv.families.parts.norm_places import no_norm_after_experts, norms_at
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.families.parts.windows import rotating_windows, windows_by_layer

_WIDTH = 512
_LAYERS = norms_at(
    ATTENTION,
    (MOE_NORM, *QWEN_EXPERTS, ROUTER_BIAS, *DEEPSEEK_SHARED),
    before=("input_layernorm", "post_attention_layernorm"),
    after=("post_attn_norm", "post_ffn_norm"),
    mlp_module="mlp",
)
_LAYER = "model.layers.{l}."
_NAMES = {
    ROUTER_BIAS.canonical: {
        "hf": _LAYER + "moe.router.expert_bias",
        "hf_stacked": _LAYER + "mlp.gate.e_score_correction_bias",
    },
    "layers.{l}.attn_output_norm.weight": {
        "hf_stacked": _LAYER + "post_self_attn_layernorm.weight"
    },
    "layers.{l}.mlp_output_norm.weight": {"hf_stacked": _LAYER + "post_mlp_layernorm.weight"},
}
ROWS = in_core(respelled((EMBEDDING, *_LAYERS, *HEAD), _NAMES))
_WINDOWS = rotating_windows(windows_by_layer(513, full_every=5))


def _read_windows(raw: Raw) -> Fields:
    size_of_window = raw.get("sliding_window", 513)
    if not size_of_window:
        raise UnknownFamily(
            f"{CONFIG_NAME}: sliding_window {size_of_window!r} is not supported in this architecture, "
            "which transformers can't compute without a window"
        )
    return _WINDOWS.read(raw)


_KEYS = (
    *without_keys(decoder_keys(positions=262144, kv_heads=4, head_dim=128), "intermediate_size"),
    follows("mlp.ffn", lambda raw: need_size(raw, "moe_intermediate_size", _WIDTH)),
    Keys(_WINDOWS.names, _read_windows, _WINDOWS.write),
    size("num_local_experts", "experts.count", 384),
    size("num_experts_per_tok", "experts.per_token", 6),
    size("moe_intermediate_size", "experts.ffn", _WIDTH),
    size("shared_expert_intermediate_size", "experts.shared_ffn", _WIDTH),
    flags("norm_topk_prob", ("experts.renormalize",), default=False),
)
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    "attention.qk_norm": True,
    "experts.bias_on_logits": True,
    "layers.mlp": "experts",
    "norm.place": "both",
}
_ONLY = {**SILU, "attention_bias": False, "use_sliding_window": True}
"""transformers' class knows only the first. Published files have all of them."""

FAMILY = Family(
    name="kolibri1",
    architectures=("Kolibri1ForCausalLM",),
    model_type="kolibri1",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=None,
    proven="names",
    notices=no_norm_after_experts,
    aliases={"num_experts": "num_local_experts"},
)
