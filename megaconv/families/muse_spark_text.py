"""The language model of Muse Spark: as Muse Glimmer, with experts of another width, and gates of residuals.

    hf    model.layers.{l}.mlp.{gate, pre_expert_proj, pre_expert_norm, experts, post_expert_proj},
          model.layers.{l}.{post_attention_residual_gate, post_feedforward_residual_gate}

Each head's output passes a norm without a weight, and so does the output of attention. Megatron core has no such layers:
these models are converted between Hugging Face's files.
"""

from dataclasses import replace
from typing import Any

from megaconv.families.muse_glimmer_text import FAMILY as GLIMMER
from megaconv.families.parts.decoder_keys import SILU
from megaconv.families.parts.decoder_rows import MLP
from megaconv.families.parts.deepseek_experts import (
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
)
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.keys import number, positive_number, size
from megaconv.families.parts.muse import MUSE, muse_keys, muse_rows
from megaconv.families.parts.row_changes import without_biases, without_rows
from megaconv.model.table import Row, Stacked

_LAYER = "model.layers.{l}."
_MOE = _LAYER + "mlp."
_EXPERTS = (
    MOE_NORM,
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe", hf=_MOE + "gate.weight"),
    ROUTER_BIAS,
    Row("layers.{l}.mlp.latent.down.weight", ("expert_latent hidden",), when="moe",
        hf=_MOE + "pre_expert_proj.weight"),
    Row("layers.{l}.mlp.latent.in_norm.weight", ("expert_latent",), when="moe",
        hf=_MOE + "pre_expert_norm.weight"),
    Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn expert_latent", "moe_ffn expert_latent"), tp=0, when="moe",
        hf=Stacked(_MOE + "experts.gate_up_proj")),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("expert_latent moe_ffn",), tp=1, when="moe",
        hf=Stacked(_MOE + "experts.down_proj")),
    Row("layers.{l}.mlp.latent.out_norm.weight", ("expert_latent",), when="moe",
        hf=_MOE + "experts.post_expert_norm.weight"),
    Row("layers.{l}.mlp.latent.up.weight", ("hidden expert_latent",), when="moe",
        hf=_MOE + "post_expert_proj.weight"),
)  # fmt: skip
_GATES = tuple(
    Row(f"layers.{{l}}.{sublayer}_residual_gate", ("hidden",), hf=f"{_LAYER}{word}_residual_gate.gate")
    for sublayer, word in (("attn", "post_attention"), ("mlp", "post_feedforward"))
)  # fmt: skip
_PLAIN = muse_rows((*without_biases(MLP), *_EXPERTS))
ROWS = (*without_rows(_PLAIN, "layers.{l}.attn_output_norm.weight"), *_GATES)

_KEYS = (
    *muse_keys(
        ffn=16384, kv_heads=16, head_dim=64, positions=1048576, theta=5e5, query=5.4730064863875, logits=0.1767766952966369
    ),
    *routed_experts(count=256, width=4096, count_key="num_local_experts"),
    size("moe_hidden_size", "experts.latent", 4096),
    mlp_layer_types(dense=0),
    number("routed_scaling_factor", "experts.scale", 1.0),
    positive_number("residual_gate_temperature", "residual_temperature", 0.3),
)  # fmt: skip
_FIXED: dict[str, Any] = {
    **MUSE,
    **SIGMOID_ROUTER,
    "attention.output_norm": True,
    "norm.scales_first": True,
    "experts.normed_latent": True,
    "experts.divided_logits": True,
}

FAMILY = replace(
    GLIMMER, name="muse_spark_text", architectures=("MuseSparkTextModel",), model_type="muse_spark_text", rows=ROWS, keys=_KEYS,
    fixed=_FIXED, only={**SILU, "attention_bias": False},
)  # fmt: skip
