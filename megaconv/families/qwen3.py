"""Qwen 3: norms on q and k, a head_dim of its own."""

from megaconv.families import Family
from megaconv.families.llama import BIASES, IGNORED, ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.qwen2 import QWEN_WINDOWS

FAMILY = Family(
    "qwen3", ("Qwen3ForCausalLM",), "qwen3", ROWS,
    keys=(*decoder_keys(positions=32768, kv_heads=32, head_dim=128), QWEN_WINDOWS, BIASES),
    fixed=LLAMA_LIKE | {"attention.qk_norm": True}, only=SILU, ignored=IGNORED, features=("qk_norm",),
    recognized=f"{PLAIN} qk_norm",
)  # fmt: skip
