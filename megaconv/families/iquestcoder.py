"""IQuest-Coder: Llama with its own head size and other defaults."""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    HEADS_DIVIDE_HIDDEN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(positions=131072, kv_heads=8, head_dim=128, epsilon=1e-5, tokens=(1, 2, None)),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = replace(
    LLAMA, name="iquestcoder", architectures=("IQuestCoderForCausalLM",), model_type="iquestcoder", rows=in_core(LLAMA.rows),
    keys=_KEYS, only={**SILU, "clip_qkv": None, "use_sliding_window": False}, recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Llama."""
