"""Lara Mini: gated delta nets, windows with rope, full attention without rope; experts and a shared expert in each layer.

    hf     model.layers.{l}.linear_attn.{in_proj, conv1d, out_norm, out_proj}: one matrix for all projections of a delta net

The words of `layer_types` name both the mixer and the window of a layer. Unlike Qwen3-Next, the norms multiply by their
weight alone, attention has no gate of its output, and the shared expert has no gate. Source: LaraMiniConfig,
modeling_lara_mini.py and conversion_mapping.py of transformers 5.24.
"""

from itertools import cycle, islice

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.delta_net import delta_net_sizes, linear_rows
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, shared_expert_rows
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    Fields,
    Keys,
    Raw,
    flags,
    follows,
    need_size,
    size,
)
from megaconv.families.parts.layer_mixers import LAYER_TYPES, layer_words
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.row_changes import in_all_forms, in_core, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.subjects import LayerKind
from megaconv.model.table import Fused, Spelling, Stacked

_LINEAR, _MLP = "model.layers.{l}.linear_attn.", "model.layers.{l}.mlp."
_NAMES: dict[str, dict[str, Spelling | str]] = {
    "layers.{l}.linear.out_norm.weight": {"hf": _LINEAR + "out_norm.weight"},
}
_STACKED: dict[str, Spelling] = {
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_MLP + "experts.gate_up_proj"),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_MLP + "experts.down_proj"),
}
"""transformers reads no other form of this architecture's experts."""
_PROJECTIONS = Fused(_LINEAR + "in_proj.weight")
_DELTA_NETS = respelled(linear_rows(_PROJECTIONS, zero_centered=False), _NAMES)
_SHARED = shared_expert_rows(
    "mlp.shared_expert.{gate_proj|up_proj}.weight", "mlp.shared_expert.down_proj.weight"
)
_EXPERTS = in_all_forms((MOE_NORM, *QWEN_EXPERTS, *_SHARED), _STACKED)
ROWS = in_core(
    (EMBEDDING, *rows_of("attention", ATTENTION), *_DELTA_NETS, *_EXPERTS, *HEAD),
)

_LINEAR_WORD, _WINDOWED, _FULL = "linear_attention", "sliding_attention", "full_attention"
_USUAL = (_LINEAR_WORD, _WINDOWED, _LINEAR_WORD, _FULL, _WINDOWED)
"""The words of the first layers if `layer_types` is missing. They repeat."""
_WINDOW = "sliding_window"
_USUAL_WINDOW = 512


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, "num_hidden_layers")
    usual = islice(cycle(_USUAL), layers)
    words = layer_words(raw, _USUAL, layers, lambda: list(usual))
    window = need_size(raw, _WINDOW, _USUAL_WINDOW)
    return {
        "layers.mixer": one_or_each(
            tuple("linear" if word == _LINEAR_WORD else "attention" for word in words)
        ),
        "layers.window": one_or_each(
            tuple(window if word == _WINDOWED else None for word in words)
        ),
        "layers.rotates": one_or_each(tuple(word != _FULL for word in words)),
    }


def _word(kind: LayerKind) -> str:
    if kind.mixer == "linear":
        return _LINEAR_WORD
    return _FULL if kind.window is None else _WINDOWED


def _write_layers(config: ModelConfig) -> Raw:
    return {
        LAYER_TYPES: [_word(kind) for kind in config.layers],
        _WINDOW: config.window or _USUAL_WINDOW,
    }


_WIDTH = 512
_DECODER = decoder_keys(
    positions=131072, kv_heads=4, head_dim=128, tied=True, tokens=(None, 151643, None)
)
_KEYS = (
    *without_keys(_DECODER, "intermediate_size"),
    ATTENTION_BIASES,
    Keys((LAYER_TYPES, _WINDOW), _read_layers, _write_layers),
    *delta_net_sizes(key_heads=8, value_heads=16),
    size("num_experts", "experts.count", 128),
    size("num_experts_per_tok", "experts.per_token", 4),
    size("moe_intermediate_size", "experts.ffn", _WIDTH),
    follows("mlp.ffn", lambda raw: need_size(raw, "moe_intermediate_size", _WIDTH)),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    flags("norm_topk_prob", ("experts.renormalize",), default=True),
)

_RECOGNIZED = (
    "rope !norm_bias silu gated pre_norm !zero_centered qk_norm !output_gate !sinks !clamped !mla "
    "!encoder !transform linear_layers mixture !sigmoid_router shared_ffn !shared_gate"
)

FAMILY = Family(
    name="lara_mini",
    architectures=("LaraMiniForCausalLM",),
    model_type="lara_mini",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, "attention.qk_norm": True, "layers.mlp": "experts"},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=_RECOGNIZED,
)
