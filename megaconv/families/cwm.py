"""Code World Model: Llama 3 with a window on three of four layers."""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, SILU, decoder_keys
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer

_SCALING = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOKENS = (128000, (128001, 128008, 128009), None)
_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, head_dim=128, ffn=21504, epsilon=1e-5, rotation=rope(1e6, _SCALING, stated_theta=1e6), tokens=_TOKENS
    ),
    windows_by_layer(8192, full_every=4, full_first=True),
    HEADS_DIVIDE_HIDDEN,
)  # fmt: skip

FAMILY = replace(
    LLAMA, name="cwm", architectures=("CwmForCausalLM",), model_type="cwm", rows=in_core(LLAMA.rows), keys=_KEYS,
    only={**SILU, "mlp_bias": False}, recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Llama."""
