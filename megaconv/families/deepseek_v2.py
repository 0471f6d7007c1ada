"""DeepSeek V2 Lite and others that choose experts by softmax scores without groups: V3's latent attention, no router bias."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.deepseek_v3 import LATENT_ATTENTION, latent_attention, latent_attention_words, require_only
from megaconv.families.glm4_moe import SHARED, deepseek_expert_words, deepseek_experts
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.families.qwen2_moe import QWEN_EXPERTS
from megaconv.model.config import ModelConfig

ROWS = (EMBEDDING, *LATENT_ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *SHARED, *HEAD)

_DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_EXPERT_DEFAULTS = {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
}
"""The epsilon is that of the latent norms, whatever the others have; Megatron has one for all."""


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    require_only(raw, _ONLY)
    if raw.get("topk_method", "greedy") != "greedy":
        raise NotExpressible(
            f"config.json: topk_method {raw['topk_method']!r} (DeepSeek-V2, not Lite) ranks groups by their best expert, "
            "which Megatron core's router has no words for; only greedy is known"
        )
    experts = deepseek_experts({**_EXPERT_DEFAULTS, **raw}, 0)
    softmax = {"router_score": "softmax", "router_bias": False, "renormalize": False}
    softmax |= {"router_groups": None, "router_group_topk": None}
    attention = latent_attention({**_LATENT_DEFAULTS, **raw})
    no_head_dim = {**raw, "head_dim": None}
    return read_decoder(no_head_dim, "deepseek_v2", _DEFAULTS, **attention, **experts | softmax, hf=dict(raw))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    architecture = "DeepseekV2ForCausalLM"
    refuse(
        config, architecture, qkv_bias="attention biases", mlp_bias="MLP biases", shared_gate="a gated shared expert"
    )
    refuse(
        config,
        architecture,
        renormalize="weights of experts that sum up to 1",
        mtp_layers="layers of multi-token prediction",
    )
    if config.norm_epsilon != _ONLY["rms_norm_eps"]:
        raise NotExpressible(
            f"the model's norms have an epsilon of {config.norm_epsilon}, which {architecture} has no place for"
        )
    words = deepseek_expert_words(replace(config, router_groups=None, router_group_topk=None), architecture)
    routing = {"scoring_func": "softmax", "topk_method": "greedy", "n_group": None, "topk_group": None}
    latent = latent_attention_words(config)
    latent.pop("rope_interleave")
    return write_decoder(config, architecture, "deepseek_v2", **words | latent | routing)


FAMILY = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    "deepseek_v2",
    ROWS,
    read_hf,
    write_hf,
    IGNORED,
    features=("mla",),
)
