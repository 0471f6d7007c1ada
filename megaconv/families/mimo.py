"""MiMo 7B: Qwen 2 plus a layer for multi-token prediction (MTP) under its own names.

No release of transformers contains this architecture.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.mtp import OwnLayer
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import QWEN_WINDOWS
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
"""The layer joins the hidden state's half before the embedding's half; Megatron uses the other order."""

FAMILY = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    model_type="mimo",
    rows=_OWN.rows(in_core(LLAMA_ROWS)),
    keys=(*decoder_keys(positions=32768, kv_heads=32), QWEN_WINDOWS, _OWN.keys),
    fixed=LLAMA_LIKE | {"attention.qkv_bias": True},
    only={**SILU, "attention_bias": True},
    ignored=ROPE_FREQUENCIES,
    complete=_OWN.complete,
    features=("qkv_bias",),
    proven="names",
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Qwen 2. Defaults are those of
Qwen 2's class, and names those of Megatron-Bridge at 067f987df03b."""
