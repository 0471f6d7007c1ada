"""DeepSeek V3, R1, Kimi K2, Moonlight and all that share the class: latent attention, dense first layers, experts routed by
sigmoid, shared ones, MTP.
"""

from megaconv.families import Family
from megaconv.families.glm4_moe import ROUTER_BIAS, SHARED, SIGMOID
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.expert_keys import first_dense, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import Fields, Keys, Raw, count, need_size
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.qwen2_moe import QWEN_EXPERTS
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, OtherAxis, Row

_HF = "model.layers.{l}.self_attn."
_CORE = "decoder.layers.{l}.self_attention."

INPUT_NORM = Row(
    "layers.{l}.input_norm.weight", ("hidden",),
    hf="model.layers.{l}.input_layernorm.weight",
    core="decoder.layers.{l}.input_layernorm.weight",
)  # fmt: skip
LATENT_ATTENTION = (
    INPUT_NORM,
    Row("layers.{l}.attn.q.weight", ("heads*head_dim hidden",), tp=0, when="q_direct",
        hf=_HF + "q_proj.weight",
        core=_CORE + "linear_q_proj.weight"),
    # Transformer Engine's ranks each hold the whole of what goes down to the latent width, those of local layers a part.
    Row("layers.{l}.attn.q_down.weight", ("q_rank hidden",), when="q_latent",
        hf=_HF + "q_a_proj.weight",
        core=_CORE + "linear_q_down_proj.weight",
        core_local=OtherAxis(_CORE + "linear_q_down_proj.weight", tp=0)),
    Row("layers.{l}.attn.q_latent_norm.weight", ("q_rank",), when="q_latent",
        hf=_HF + "q_a_layernorm.weight",
        core=_CORE + "linear_q_up_proj.layer_norm_weight",
        core_local=_CORE + "q_layernorm.weight"),
    Row("layers.{l}.attn.q_up.weight", ("heads*head_dim q_rank",), tp=0, when="q_latent",
        hf=_HF + "q_b_proj.weight",
        core=_CORE + "linear_q_up_proj.weight"),
    Row("layers.{l}.attn.kv_down.weight", ("kv_and_rope hidden",),
        hf=_HF + "kv_a_proj_with_mqa.weight",
        core=_CORE + "linear_kv_down_proj.weight",
        core_local=OtherAxis(_CORE + "linear_kv_down_proj.weight", tp=0)),
    Row("layers.{l}.attn.kv_latent_norm.weight", ("kv_rank",),
        hf=_HF + "kv_a_layernorm.weight",
        core=_CORE + "linear_kv_up_proj.layer_norm_weight",
        core_local=_CORE + "kv_layernorm.weight"),
    Row("layers.{l}.attn.{k|v}_up.weight", ("heads*nope_dim kv_rank", "heads*v_dim kv_rank"), tp=0,
        hf=Fused(_HF + "kv_b_proj.weight", groups="heads"),
        core=Fused(_CORE + "linear_kv_up_proj.weight", groups="heads")),
    Row("layers.{l}.attn.o.weight", ("hidden heads*v_dim",), tp=1,
        hf=_HF + "o_proj.weight",
        core=_CORE + "linear_proj.weight"),
)  # fmt: skip
UNPREDICTING = (EMBEDDING, *LATENT_ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *SHARED, *HEAD)
"""Without layers for multi-token prediction."""
ROWS = with_mtp(UNPREDICTING)


def latent_heads(*, kv_rank: int, q_rank: int, rope: int, nope: int, v: int) -> Keys:
    """Widths of latent vectors, and of a head's parts: rotating ones, others, values. Numbers: where keys are missing."""
    usual = {
        "kv_lora_rank": kv_rank,
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": v,
    }

    def read(raw: Raw) -> Fields:
        given = {**usual, **raw}
        heads, rope_dim = need_size(raw, "num_attention_heads"), need_size(given, "qk_rope_head_dim")
        return {
            "attention.heads": heads,
            "attention.kv_heads": heads,
            "attention.head_dim": need_size(given, "qk_nope_head_dim") + rope_dim,
            "latent.rope_dim": rope_dim,
            "latent.v_dim": need_size(given, "v_head_dim"),
            "latent.kv_rank": need_size(given, "kv_lora_rank"),
            "latent.q_rank": given["q_lora_rank"] or 0,
        }

    return Keys(("num_attention_heads", "num_key_value_heads", "head_dim", "qk_head_dim", *usual), read, _write_latent)


def _write_latent(config: ModelConfig) -> Raw:
    latent = config.latent
    return {
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": config.attention.head_dim - latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
    }


LATENT_HEADS = latent_heads(kv_rank=512, q_rank=1536, rope=64, nope=128, v=128)
"""Of V2 as of V3."""
LATENT_EPSILON = 1e-6
"""What transformers' classes give the norms of latent vectors, whatever rms_norm_eps says of the others."""


def one_epsilon(config: ModelConfig) -> tuple[str, ...]:
    """The notice of a model whose norms have two epsilons in transformers (Moonlight, GLM-4.7-Flash)."""
    if config.norm.epsilon == LATENT_EPSILON:
        return ()
    return (
        f"the norms of the latent vectors (kv_a_layernorm, q_a_layernorm) have epsilon {LATENT_EPSILON:g} in transformers and "
        f"{config.norm.epsilon:g}, that of all other norms, in Megatron, which has one for all: the weights are the same, "
        "logits differ slightly (by some 1e-4 at an epsilon of 1e-05)",
    )


_KEYS = (
    *body_keys(positions=4096, tokens=(0, 1, None)),
    LATENT_HEADS,
    *routed_experts(count=256, width=2048),
    shared_experts(count=1, width=2048),
    first_dense(3),
    *sigmoid_routing(scale=2.5, groups=8, group_topk=4),
    count("num_nextn_predict_layers", "mtp_layers", 1),
)
_ONLY = {
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    **SILU,
}

FAMILY = Family(
    "deepseek_v3", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), "deepseek_v3", ROWS, keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID}, only=_ONLY, ignored=IGNORED, features=("mla", "q_latent"), complete=without_missing,
    recognized="mla mixture sigmoid_router router_bias !indexer", other_types=("kimi_k2",), notices=one_epsilon,
)  # fmt: skip
