"""Phi-3.5 MoE and Phi-mini MoE: Mixtral's experts, LayerNorm, biases, and a router that chooses two experts by sparsemixer.

Sparsemixer (arXiv 2409.12136) weighs each expert by a softmax over the scores that are near its own; router_jitter_noise
says how near. Megatron core has no such router: these models are converted between Hugging Face's files. Source:
PhimoeConfig and modeling_phimoe.py of transformers 5.23.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.mixtral import FAMILY as MIXTRAL
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LAYER_NORM, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.experts import EXPERTS_WIDTH
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_number, size
from megaconv.families.parts.rope import rope_object
from megaconv.families.parts.row_changes import (
    hf_only,
    respelled,
    with_head_bias,
    with_norm_biases,
    without_rows,
)
from megaconv.families.parts.windows import window
from megaconv.families.phi3 import longrope
from megaconv.model.config import ModelConfig

_ROUTER = {"layers.{l}.mlp.router.weight": {"hf_stacked": "model.layers.{l}.mlp.router.weight"}}
_WITHOUT_QK_NORM = without_rows(MIXTRAL.rows, "layers.{l}.attn.{q|k}_norm.weight")
ROWS = hf_only(respelled(with_head_bias(with_norm_biases(_WITHOUT_QK_NORM)), _ROUTER))

_LONGROPE, _LENGTH = longrope(1e6), "original_max_position_embeddings"


def _read_rope(raw: Raw) -> Fields:
    """The class takes the training length from the object alone, and needs a factor for short and for long texts."""
    stated = rope_object(raw)
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind not in ("default", "longrope"):
        # Phi-3's reader takes the first names of longrope. This class scales by that name, and by longrope's factors too.
        raise NotExpressible(
            f"{CONFIG_NAME}: rope scaling {kind!r} is not supported in this architecture, only 'longrope' is"
        )
    found = _LONGROPE.read(
        {**raw, _LENGTH: stated.get(_LENGTH, raw.get("max_position_embeddings"))}
    )
    if found["positions.scaling"]:
        for key in ("short_mscale", "long_mscale"):
            need_number({key: stated.get(key)}, key, 1.0)
    return found


def _write_rope(config: ModelConfig) -> Raw:
    written = _LONGROPE.write(config)
    scaling = written["rope_scaling"]
    return {**written, "rope_scaling": scaling and {**scaling, _LENGTH: written[_LENGTH]}}


_NEAR = "router_jitter_noise"
# The key isn't named: in every other architecture, it changes nothing.
_NEARNESS = Keys(
    (),
    lambda raw: {"experts.nearness": need_number(raw, _NEAR, 0.01)},
    lambda config: {_NEAR: config.experts.nearness},
)
_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, ffn=6400, epsilon=1e-5, rotation=Keys(_LONGROPE.names, _read_rope, _write_rope),
        tokens=(1, 2, None)
    ),
    window(None),
    size("num_local_experts", "experts.count", 16),
    EXPERTS_WIDTH,
    ATTENTION_BIASES,
    flags("lm_head_bias", ("head.bias",), default=False),
    _NEARNESS,
)  # fmt: skip
_FIXED = {
    **LAYER_NORM,
    "layers.mlp": "experts",
    "mlp.activation": "silu",
    "mlp.gated": True,
    "experts.per_token": 2,
    "experts.score": "sparsemixer",
    "experts.renormalize": False,
}

FAMILY = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_type="phimoe",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "num_experts_per_tok": 2},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
