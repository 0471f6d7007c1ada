"""nanochat: norms without trained values, also after the embedding and on rotated q and k; squared ReLU; capped logits.

Rope rotates in the other direction. Megatron core has no such norms: these models are converted between Hugging Face's
files, and trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, SQUARED_RELU, decoder_keys
from megaconv.families.parts.keys import maybe_number
from megaconv.families.parts.row_changes import (
    in_core,
    with_modules,
    without_gate,
    without_norms,
)

_MODULES = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
ROWS = in_core(with_modules(without_norms(without_gate(LLAMA.rows)), _MODULES))
_KEYS = (
    *decoder_keys(positions=2048, ffn=8192, tokens=(0, 1, 1)),
    ATTENTION_BIASES,
    maybe_number("final_logit_softcapping", "head.logit_cap", 15.0),
)
_FIXED = {
    **SQUARED_RELU,
    "positions.kind": "rope",
    "positions.backwards": True,
    "norm.kind": "RMSNorm",
    "norm.weight": False,
    "norm.embedding": True,
    "attention.qk_l2_norm": True,
}

FAMILY = replace(
    LLAMA, name="nanochat", architectures=("NanoChatForCausalLM",), model_type="nanochat", rows=ROWS, keys=_KEYS, fixed=_FIXED,
    only={"hidden_act": "relu2"}, recognized=None, proven="names",
)  # fmt: skip
