"""GLM-5: DeepSeek V3.2 with another epsilon, no groups of experts, and indexers whose elements rotate with their neighbours.

GLM-5.2, in which layers share what one of them has chosen, is refused.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.deepseek_v3 import latent_heads
from megaconv.families.deepseek_v32 import EXPERT_KEYS, EXPERTS, ONLY
from megaconv.families.glm4_moe import SIGMOID
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, body_keys
from megaconv.families.parts.expert_keys import sigmoid_routing
from megaconv.families.parts.indexer import indexer_keys, sparse_attention, sparse_notices
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.families.parts.mtp import with_mtp, without_missing

ROWS = with_mtp((EMBEDDING, *sparse_attention(halves=False), *EXPERTS, *HEAD))
_FULL = {"full", "F"}


def _read_sharing(raw: Raw) -> Fields:
    """Layer by layer in indexer_types or index_topk_pattern; without either, one of index_topk_freq layers has an indexer."""
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
    "glm_moe_dsa", ("GlmMoeDsaForCausalLM",), "glm_moe_dsa", ROWS, keys=_KEYS, fixed={**LLAMA_LIKE, **SIGMOID, **_PAIRS},
    only={**ONLY, "indexer_rope_interleave": True}, ignored=IGNORED, features=("mla", "q_latent", "indexer"),
    complete=without_missing, recognized="mla mixture sigmoid_router router_bias indexer interleaved_indexer",
    assumed=lambda fields: _PAIRS, notices=sparse_notices,
)  # fmt: skip
