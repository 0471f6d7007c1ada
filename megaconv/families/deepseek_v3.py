"""DeepSeek V3, R1 and all that share the class: latent attention, dense first layers, experts routed by sigmoid, shared ones, MTP."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.glm4_moe import ROUTER_BIAS, SHARED, deepseek_expert_words, deepseek_experts
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
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
ROWS = with_mtp((EMBEDDING, *LATENT_ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *SHARED, *HEAD))

_DEFAULTS = {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
_LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_EXPERT_DEFAULTS = {
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_ONLY = {
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
}
"""transformers' class gives the latent norms this epsilon whatever the others have; Megatron has one for all."""


def latent_attention(raw: Mapping[str, Any]) -> dict[str, Any]:
    """In DeepSeek's words, as fields of ModelConfig."""
    rope_dim = raw["qk_rope_head_dim"]
    return {
        "kv_heads": raw["num_attention_heads"],
        "head_dim": raw["qk_nope_head_dim"] + rope_dim,
        "rope_dim": rope_dim,
        "v_dim": raw["v_head_dim"],
        "kv_rank": raw["kv_lora_rank"],
        "q_rank": raw["q_lora_rank"] or 0,
    }


def latent_attention_words(config: ModelConfig) -> dict[str, Any]:
    """The way back."""
    return {
        "head_dim": config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "v_head_dim": config.v_dim,
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.q_rank or None,
        "rope_interleave": True,
    }


def require_only(raw: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raises NotExpressible for words that have any other value than the one we know."""
    for name, value in only.items():
        if raw.get(name, value) != value:
            raise NotExpressible(
                f"config.json: {name} {raw[name]!r} is not known in this architecture, only {value!r} is"
            )


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    require_only(raw, _ONLY)
    experts = deepseek_experts({**_EXPERT_DEFAULTS, **raw}, 3)
    mtp = {"mtp_layers": raw.get("num_nextn_predict_layers", 1)}
    attention = latent_attention({**_LATENT_DEFAULTS, **raw})
    return read_decoder(
        {**raw, "head_dim": None}, "deepseek_v3", _DEFAULTS, **attention, **experts, **mtp, hf=dict(raw)
    )


def write_hf(config: ModelConfig) -> dict[str, Any]:
    architecture = "DeepseekV3ForCausalLM"
    refuse(
        config, architecture, qkv_bias="attention biases", mlp_bias="MLP biases", shared_gate="a gated shared expert"
    )
    if config.norm_epsilon != _ONLY["rms_norm_eps"]:
        raise NotExpressible(
            f"the model's norms have an epsilon of {config.norm_epsilon}, which {architecture} has no place for"
        )
    words = deepseek_expert_words(config, architecture) | latent_attention_words(config)
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    mtp = {"num_nextn_predict_layers": config.mtp_layers}
    return write_decoder(config, architecture, "deepseek_v3", **words, **routing, **mtp)


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    "deepseek_v3",
    ROWS,
    read_hf,
    write_hf,
    IGNORED,
    features=("mla", "q_latent"),
    complete=without_missing,
)
