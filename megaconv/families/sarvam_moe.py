"""Sarvam's models with experts and plain attention (30B): tensors with Ling 2.0's names.

transformers 5.24 computes them with GLM 4.5's class and reads the same files. It has other keys for some sizes, and its
own model_type. megaconv reads both forms and writes the published keys, which both classes understand. Source:
SarvamMoEConfig and conversion_mapping.py of transformers 5.24; Megatron-Bridge at 067f987df03b.
"""

from megaconv.families import Family
from megaconv.families.bailing_moe2 import ONLY, PLAIN
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import partial_rotation, rope

_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=4, head_dim=64, ffn=8192, rotation=rope(8e6), partial=partial_rotation(1.0),
        tokens=(None, 1, 0),
    ),
    *routed_experts(count=128, per_token=6, width=1024, count_key="num_experts"),
    shared_experts(count=1, width=1024, key="num_shared_experts"),
    first_dense(1),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    flags("use_qkv_bias", ("attention.qkv_bias",), default=False),
    flags("use_qk_norm", ("attention.qk_norm",), default=True),
)  # fmt: skip
_OF_TRANSFORMERS = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "attention_bias": "use_qkv_bias",
}

FAMILY = Family(
    name="sarvam_moe",
    architectures=("SarvamMoEForCausalLM",),
    classes_of_others=("Glm4MoeForCausalLM",),
    model_type="sarvam_moe",
    rows=PLAIN,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER},
    only={**ONLY, "num_nextn_predict_layers": 0},
    aliases=_OF_TRANSFORMERS,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5."""
