"""GLM 4.5 and later: grouped-query attention, dense first layers, then experts routed as DeepSeek's are."""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM, shared_expert_rows
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys, partial_rotation
from megaconv.families.parts.keys import Fields, Keys, Raw, count, flags, need_size, size
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.qwen2_moe import QWEN_EXPERTS
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Row

ROUTER_BIAS = Row(
    "layers.{l}.mlp.router.bias", ("experts",), when="moe router_bias",
    hf="model.layers.{l}.mlp.gate.e_score_correction_bias",
    core="decoder.layers.{l}.mlp.router.expert_bias",
)  # fmt: skip
SHARED = shared_expert_rows("mlp.shared_experts.{gate_proj|up_proj}.weight", "mlp.shared_experts.down_proj.weight")
ROWS = with_mtp((EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *SHARED, *HEAD))


def deepseek_experts(*, count: int, width: int, shared: int, dense: int) -> tuple[Keys, ...]:
    """Routed and shared experts as DeepSeek describes them; the numbers count where keys are missing."""

    def read_layers(raw: Raw) -> Fields:
        first, layers = raw.get("first_k_dense_replace", dense), need_size(raw, "num_hidden_layers")
        return {"layers.mlp": per_layer(range(first, layers), layers, "experts", "dense")}

    def write_layers(config: ModelConfig) -> Raw:
        return {"first_k_dense_replace": min(config.layers_with("moe"), default=config.layer_count)}

    def read_shared(raw: Raw) -> Fields:
        experts = raw.get("n_shared_experts", shared) or 0
        return {"experts.shared_ffn": experts * need_size(raw, "moe_intermediate_size", width)}

    return (
        Keys(("first_k_dense_replace",), read_layers, write_layers),
        size("n_routed_experts", "experts.count", count),
        size("num_experts_per_tok", "experts.per_token", 8),
        size("moe_intermediate_size", "experts.ffn", width),
        Keys(
            ("n_shared_experts",),
            read_shared,
            lambda config: {"n_shared_experts": config.experts.shared_ffn // max(1, config.experts.ffn)},
        ),
    )


def sigmoid_routing(*, scale: float, groups: int, group_topk: int) -> tuple[Keys, ...]:
    """How DeepSeek-V3 chooses experts; the numbers count where keys are missing."""

    def read(raw: Raw) -> Fields:
        found = {"experts.groups": raw.get("n_group", groups), "experts.group_topk": raw.get("topk_group", group_topk)}
        return found | {"experts.scale": raw.get("routed_scaling_factor", scale)}

    def write(config: ModelConfig) -> Raw:
        experts = config.experts
        written = {"n_group": experts.groups or 1, "topk_group": experts.group_topk or 1}
        return written | {"routed_scaling_factor": experts.scale or 1.0}

    return (
        Keys(("n_group", "topk_group", "routed_scaling_factor"), read, write),
        flags("norm_topk_prob", ("experts.renormalize",), default=True),
    )


_KEYS = (
    *decoder_keys(positions=131072, kv_heads=8, epsilon=1e-5, partial=partial_rotation(0.5)),
    *deepseek_experts(count=128, width=1408, shared=1, dense=1),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    flags("use_qk_norm", ("attention.qk_norm",), default=False),
    count("num_nextn_predict_layers", "mtp_layers"),
)
SIGMOID: Fields = {"experts.score": "sigmoid", "experts.router_bias": True}
"""Of the router."""

FAMILY = Family(
    "glm4_moe", ("Glm4MoeForCausalLM",), "glm4_moe", ROWS, keys=_KEYS, fixed={**LLAMA_LIKE, **SIGMOID}, only=SILU,
    ignored=IGNORED, complete=without_missing, recognized=f"{MIXTURE} sigmoid_router",
)  # fmt: skip
