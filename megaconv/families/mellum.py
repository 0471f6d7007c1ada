"""Mellum 2: Qwen 3 MoE with a window on some layers, which have a rope base of their own. Multi-token prediction is left
out."""

from dataclasses import replace

from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, decoder_keys
from megaconv.families.parts.deepseek_experts import mlp_layer_types
from megaconv.families.parts.keys import Keys, flags, size
from megaconv.families.parts.layer_ropes import nested_layer_ropes
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer
from megaconv.families.qwen3_moe import FAMILY as QWEN_3_MOE

_MTP = ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
_KEYS = (
    *decoder_keys(positions=131072, kv_heads=4, head_dim=128, ffn=7168, rotation=nested_layer_ropes(5e5, 1e4)),
    ATTENTION_BIASES,
    windows_by_layer(1024, full_every=1),
    size("num_local_experts", "experts.count", 64),
    size("num_experts_per_tok", "experts.per_token", 8),
    size("moe_intermediate_size", "experts.ffn", 896),
    flags("norm_topk_prob", ("experts.renormalize",), default=True),
    mlp_layer_types(dense=0),
    Keys(_MTP, lambda raw: {}, lambda config: {}),
)  # fmt: skip

FAMILY = replace(
    QWEN_3_MOE, name="mellum", architectures=("MellumForCausalLM",), model_type="mellum", rows=in_core(QWEN_3_MOE.rows), keys=_KEYS,
    aliases={"num_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"}, left_out=MTP_LEFT_OUT, recognized=None,
)  # fmt: skip
