"""GLM-5: DeepSeek V3.2 with another epsilon, no expert groups, and indexers with rope on pairs of neighbouring
elements.

In GLM-5.2 some layers have no indexer, and attend to the positions that an earlier one selected. Megatron's arguments
can't describe these models: they are converted between Hugging Face's files only. A layer for multi-token prediction
always has an indexer.
"""

from megaconv.families import Family
from megaconv.families.deepseek_v32 import EXPERT_KEYS, ONLY
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import DEEPSEEK_MLPS, SIGMOID_ROUTER, sigmoid_routing
from megaconv.families.parts.indexer import indexer_keys, sparse_attention, sparse_notices
from megaconv.families.parts.indexer_types import indexers_where_owned, types_by_pattern
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads
from megaconv.families.parts.mtp import with_mtp, without_missing

_EVERY_LAYER = (EMBEDDING, *sparse_attention(halves=False), *DEEPSEEK_MLPS, *HEAD)
ROWS = indexers_where_owned(with_mtp(_EVERY_LAYER))
_KEYS = (
    *body_keys(positions=202752, epsilon=1e-5, tokens=(0, 1, None)),
    latent_heads(kv_rank=512, q_rank=2048, rope=64, nope=192, v=256),
    *EXPERT_KEYS,
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    *indexer_keys(heads=32),
    types_by_pattern(),
)
_PAIRS = {"indexer.interleaved": True}

FAMILY = Family(
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    model_type="glm_moe_dsa",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS, **_PAIRS},
    only={**ONLY, "indexer_rope_interleave": True},
    ignored=ROPE_FREQUENCIES,
    features=("mla", "q_latent", "indexer"),
    complete=without_missing,
    recognized="mla mixture sigmoid_router router_bias indexer interleaved_indexer",
    assumed=lambda fields: _PAIRS,
    notices=sparse_notices,
    aliases={"num_local_experts": "n_routed_experts"},
)
