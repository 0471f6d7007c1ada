"""Flint: Qwen 3's attention with sinks, experts with a sigmoid router, a shared expert; only layers with a window have rope.

Megatron core has no sinks beside norms of q and k in one of its models: these models are converted between Hugging Face's
files, and trained.
"""

from dataclasses import replace

from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, SINKS
from megaconv.families.parts.experts import (
    MOE_NORM,
    QWEN_EXPERTS,
    qwen_expert_keys,
    shared_expert_rows,
)
from megaconv.families.parts.keys import Keys, Raw, flags, need_size, size
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import (
    layer_types,
    rotating_windows,
    windowed_layers,
    windows_on,
)
from megaconv.families.qwen3_moe import FAMILY as QWEN3_MOE
from megaconv.model.config import ModelConfig

_SHARED = shared_expert_rows(
    "mlp.shared_expert.{gate_proj|up_proj}.weight", "mlp.shared_expert.down_proj.weight"
)
_SINKS = SINKS.renamed(hf="model.layers.{l}.self_attn.softmax_offset")
ROWS = in_core((EMBEDDING, *ATTENTION, _SINKS, MOE_NORM, *MLP, *QWEN_EXPERTS, *_SHARED, *HEAD))


def _usual_layers(raw: Raw) -> list[str]:
    """The layer_types if the key is missing: full attention in the first two layers, every fourth and the last one."""
    layers = need_size(raw, "num_hidden_layers")
    full = {0, 1, layers - 1, *range(1, layers, 4)}
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


def _read_windows(raw: Raw) -> dict[str, object]:
    size_of_window = need_size(raw, "sliding_window", 513)
    return dict(windows_on(raw, windowed_layers(raw, _usual_layers(raw)), size_of_window))


def _write_windows(config: ModelConfig) -> Raw:
    return {"sliding_window": config.window or 513, "layer_types": layer_types(config)}


_WINDOWS = Keys(("sliding_window", "layer_types"), _read_windows, _write_windows)
_EXPERTS = qwen_expert_keys(count=256, per_token=6, width=512, renormalize=True)


def _read_dense(raw: Raw) -> dict[str, object]:
    """transformers' class has dense first layers if mlp_only_layers is missing."""
    usual = raw if raw.get("mlp_only_layers") is not None else {**raw, "mlp_only_layers": [0, 1]}
    return dict(_EXPERTS[0].read(usual))


_KEYS = (
    *decoder_keys(positions=262144, kv_heads=4, head_dim=128, ffn=6144),
    Keys(_EXPERTS[0].names, _read_dense, _EXPERTS[0].write),
    *_EXPERTS[1:],
    size("shared_expert_intermediate_size", "experts.shared_ffn", 1024),
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=False),
    rotating_windows(_WINDOWS),
)
_FIXED = {
    **LLAMA_LIKE,
    "attention.qk_norm": True,
    "attention.sinks": True,
    "experts.score": "sigmoid",
}

FAMILY = replace(
    QWEN3_MOE, name="flint", architectures=("FlintForCausalLM",), model_type="flint", rows=ROWS, keys=_KEYS, fixed=_FIXED,
    only=SILU, recognized=None, aliases={},
)  # fmt: skip
