"""MiMo 7B: Qwen 2, and a layer for multi-token prediction under names of its own. In no transformers release."""

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.mtp import OwnLayer
from megaconv.families.qwen2 import QWEN_WINDOWS
from megaconv.model.table import SecondHalfFirst

_MTP = "model.mtp_layers.0."
_OWN = OwnLayer(
    _MTP,
    {
        "mtp.{l}.{embed|hidden}_norm.weight": _MTP + "{token|hidden}_layernorm.weight",
        "mtp.{l}.join.weight": SecondHalfFirst(_MTP + "input_proj.weight"),
        "mtp.{l}.final_norm.weight": _MTP + "final_layernorm.weight",
    },
    "num_nextn_predict_layers",
)
"""It joins the hidden state's half before the embedding's, Megatron the other way round."""

FAMILY = Family(
    "mimo", ("MiMoForCausalLM",), "mimo", _OWN.rows(tuple(row.without("legacy", "meta") for row in ROWS)),
    keys=(*decoder_keys(positions=32768, kv_heads=32), QWEN_WINDOWS, _OWN.keys),
    fixed=LLAMA_LIKE | {"attention.qkv_bias": True}, only={**SILU, "attention_bias": True}, ignored=IGNORED, complete=_OWN.complete,
    features=("qkv_bias",), proven="names",
)  # fmt: skip
"""Not recognized: Megatron's arguments are a Qwen 2's. Defaults are those of Qwen 2's class, names Megatron-Bridge's at 067f987df03b."""
