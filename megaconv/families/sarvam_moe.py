"""Sarvam's models with experts and plain attention: tensors with Ling 2.0's names.

No release of transformers contains this architecture.
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

_KEYS = (
    *decoder_keys(positions=4096, kv_heads=4, head_dim=256, ffn=8192, tokens=(None, 1, 0)),
    *routed_experts(count=128, per_token=6, width=1024, count_key="num_experts"),
    shared_experts(count=1, width=1024, key="num_shared_experts"),
    first_dense(1),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    flags("use_qkv_bias", ("attention.qkv_bias",), default=False),
    flags("use_qk_norm", ("attention.qk_norm",), default=True),
)  # fmt: skip

FAMILY = Family(
    name="sarvam_moe",
    architectures=("SarvamMoEForCausalLM",),
    model_type="sarvam_moe",
    rows=PLAIN,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER},
    only=ONLY,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5. Names come from
Megatron-Bridge at 067f987df03b. Defaults come from configuration_sarvam_moe.py, the class in the model's files."""
