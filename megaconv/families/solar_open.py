"""Solar Open: GLM-4.5's experts in every layer."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    SIGMOID_ROUTER,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import partial_rotation, rope
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, head_dim=128, ffn=1280, epsilon=1e-5, rotation=rope(1e6), partial=partial_rotation(1.0)
    ),
    *routed_experts(count=128, width=1280),
    shared_experts(count=1, width=1280),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
)  # fmt: skip

FAMILY = Family(
    name="solar_open",
    architectures=("SolarOpenForCausalLM",),
    model_type="solar_open",
    rows=in_core(MIXTURE_ROWS),
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, "layers.mlp": "experts"},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    aliases={"num_local_experts": "n_routed_experts"},
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5."""
