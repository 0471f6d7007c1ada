"""A.X K1: DeepSeek V3 with a norm after the experts of each layer, and in its published files no bias in the router.

Published files hold such a norm of the dense first layer too, which no class reads. Megatron core has no such norm: these
models are converted between Hugging Face's files, and trained.
"""

from collections.abc import Collection
from dataclasses import replace

from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import flags
from megaconv.families.parts.latent_attention import LATENT_ATTENTION, LATENT_HEADS, LATENT_NORMS
from megaconv.families.parts.row_changes import in_core
from megaconv.families.youtu import FAMILY as YOUTU
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.table import Row

_NORM = Row(
    "layers.{l}.mlp_output_norm.weight", ("hidden",), when="moe",
    hf="model.layers.{l}.post_mlp_layernorm.weight",
    core="decoder.layers.{l}.mlp.post_layernorm.weight",
)  # fmt: skip
ROWS = in_core((EMBEDDING, *LATENT_ATTENTION, *DEEPSEEK_MLPS, _NORM, *HEAD))
_KEYS = (
    *body_keys(positions=32768, tokens=(163691, 163691, None)),
    LATENT_HEADS,
    *routed_experts(count=192, width=2048),
    shared_experts(count=1, width=2048),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    *sigmoid_routing(scale=2.5, groups=8, group_topk=4),
    flags("router_bias", ("experts.router_bias",), default=True),
)
"""router_bias is megaconv's own key: transformers fills missing biases with zeros."""
_FIXED = {**LLAMA_LIKE, **LATENT_NORMS, "experts.score": "sigmoid", "norm.after_experts": True}
_UNUSED = (r"model\.layers\.0\.post_mlp_layernorm\.weight",)


def _by_tensors(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The model without a bias in its router, if its files hold none."""
    has_bias = any(name.endswith("e_score_correction_bias") for name in names)
    return config if has_bias else changed(config, {"experts.router_bias": False})


FAMILY = replace(
    YOUTU, name="axk1", architectures=("AXK1ForCausalLM",), model_type="axk1", rows=ROWS, keys=_KEYS, fixed=_FIXED,
    only={"attention_bias": False, "rope_interleave": True, **SILU}, ignored=(*YOUTU.ignored, *_UNUSED),
    features=("mla", "q_latent"), recognized=None, proven="names", aliases={"num_local_experts": "n_routed_experts"},
    complete=_by_tensors,
)  # fmt: skip
