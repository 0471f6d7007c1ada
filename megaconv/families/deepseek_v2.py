"""DeepSeek V2 Lite and other models that select experts by softmax scores without groups.

They have V3's latent attention and no router bias.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_SHARED,
    first_dense,
    routed_experts,
    shared_experts,
)
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, number
from megaconv.families.parts.latent_attention import (
    LATENT_ATTENTION,
    LATENT_HEADS,
    LATENT_NORMS,
    one_epsilon,
)

ROWS = (EMBEDDING, *LATENT_ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *DEEPSEEK_SHARED, *HEAD)


def _no_groups(raw: Raw) -> Fields:
    if raw.get("topk_method", "greedy") != "greedy":
        raise NotExpressible(
            f"{CONFIG_NAME}: topk_method {raw['topk_method']!r} (DeepSeek-V2, not Lite) ranks groups by their best expert, "
            "which Megatron core's router can't; only greedy is supported"
        )
    return {}


_KEYS = (
    *body_keys(positions=2048, tokens=(1, 2, None)),
    LATENT_HEADS,
    *routed_experts(count=64, width=1407),
    shared_experts(count=2, width=1407),
    first_dense(0),
    number("routed_scaling_factor", "experts.scale", 1.0),
    Keys(
        ("topk_method", "n_group", "topk_group"),
        _no_groups,
        lambda config: {"topk_method": "greedy", "n_group": None, "topk_group": None},
    ),
    HEADS_DIVIDE_HIDDEN,
)
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
    **SILU,
}

FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **LATENT_NORMS, "experts.renormalize": False},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("mla",),
    recognized="mla mixture !sigmoid_router !router_bias !indexer",
    notices=one_epsilon,
    aliases={"num_experts": "n_routed_experts"},
)
