"""Qwen 3 MoE: Qwen 3's attention, and routed experts without a shared one."""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, BIASES, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.qwen2_moe import QWEN_EXPERTS, qwen_experts

ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *HEAD)


def _window(raw: Raw) -> Fields:
    return {"layers.window": raw.get("sliding_window", 4096) or None} if raw.get("use_sliding_window") else {}


_KEYS = (
    *decoder_keys(positions=32768, kv_heads=4),
    *qwen_experts(count=128, per_token=8, width=768),
    BIASES,
    Keys(
        ("use_sliding_window", "sliding_window"),
        _window,
        lambda config: {"use_sliding_window": config.window is not None, "sliding_window": config.window},
    ),
)

FAMILY = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3_moe", ROWS, keys=_KEYS, fixed=LLAMA_LIKE | {"attention.qk_norm": True},
    only=SILU, ignored=IGNORED, features=("qk_norm",), recognized=f"{MIXTURE} !sigmoid_router !shared_ffn qk_norm",
)  # fmt: skip
