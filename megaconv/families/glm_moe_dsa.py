"""GLM-5: DeepSeek V3.2 with another epsilon, no expert groups, and indexers with rope on pairs of neighbouring
elements.

GLM-5.2, in which layers share the positions that one of them selected, is refused.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.deepseek_v32 import EXPERT_KEYS, ONLY
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import DEEPSEEK_MLPS, SIGMOID_ROUTER, sigmoid_routing
from megaconv.families.parts.indexer import indexer_keys, sparse_attention, sparse_notices
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads
from megaconv.families.parts.mtp import with_mtp, without_missing

ROWS = with_mtp((EMBEDDING, *sparse_attention(halves=False), *DEEPSEEK_MLPS, *HEAD))
_FULL = {"full", "F"}


def _read_sharing(raw: Raw) -> Fields:
    """Refuse shared indexers, which indexer_types or index_topk_pattern give for each layer.

    Without either key, one of index_topk_freq layers has an indexer.
    """
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern") or ()
    if not set(kinds) <= _FULL or (not kinds and (raw.get("index_topk_freq") or 1) > 1):
        raise NotExpressible(
            f"{CONFIG_NAME}: some layers have no indexer and share another one's choice (indexer_types, index_topk_pattern, "
            "index_topk_freq), which is not supported"
        )
    return {}


_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq")
_KEYS = (
    *body_keys(positions=202752, epsilon=1e-5, tokens=(0, 1, None)),
    latent_heads(kv_rank=512, q_rank=2048, rope=64, nope=192, v=256),
    *EXPERT_KEYS,
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    *indexer_keys(heads=32),
    Keys(_SHARING, _read_sharing, lambda config: {"indexer_types": ["full"] * config.layer_count}),
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
