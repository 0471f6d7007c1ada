"""RecurrentGemma (Griffin): gated linear recurrences or attention with a window, and an MLP in each layer.

    model.layers.{l}.{temporal_pre_norm, temporal_block, channel_pre_norm, mlp_block}, model.final_norm

A recurrence keeps one number for each channel. Two gates of each head, which are matrices of a head's channels, decide what is
written and what is forgotten. Megatron core has no such mixer: these models are converted between Hugging Face's files.
Source: RecurrentGemmaConfig and modeling_recurrent_gemma.py of transformers 5.24.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys
from megaconv.families.parts.decoder_rows import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    ROPE_FREQUENCIES,
)
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    follows,
    need_size,
    number,
    size,
)
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.pure_mamba import MAX_POSITIONS
from megaconv.families.parts.rope import partial_rotation, rope
from megaconv.families.parts.row_changes import hf_only, with_modules, without_rows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row

_BLOCK, _GATES = "model.layers.{l}.temporal_block.", "model.layers.{l}.temporal_block.rg_lru."
_OWN, _WIDTHS = "layers.{l}.recurrent.", "heads*recurrent_dim"
_GATE = "heads recurrent_dim recurrent_dim"
_RECURRENT = (
    Row(_OWN + "{x|y}.weight", (f"{_WIDTHS} hidden",) * 2, tp=0, when="recurrent", hf=_BLOCK + "linear_{x|y}.weight"),
    Row(_OWN + "{x|y}.bias", (_WIDTHS,) * 2, tp=0, when="recurrent", hf=_BLOCK + "linear_{x|y}.bias"),
    Row(_OWN + "conv.weight", (f"{_WIDTHS} 1 recurrent_conv",), tp=0, when="recurrent", hf=_BLOCK + "conv_1d.weight"),
    Row(_OWN + "conv.bias", (_WIDTHS,), tp=0, when="recurrent", hf=_BLOCK + "conv_1d.bias"),
    Row(_OWN + "decay", (_WIDTHS,), tp=0, when="recurrent", hf=_GATES + "recurrent_param"),
    Row(_OWN + "{input|recurrent}_gate.weight", (_GATE,) * 2, tp=0, when="recurrent", hf=_GATES + "{input|recurrent}_gate_weight"),
    Row(_OWN + "{input|recurrent}_gate.bias", ("heads recurrent_dim",) * 2, tp=0, when="recurrent",
        hf=_GATES + "{input|recurrent}_gate_bias"),
    Row(_OWN + "out.weight", (f"hidden {_WIDTHS}",), tp=1, when="recurrent", hf=_BLOCK + "linear_out.weight"),
    Row(_OWN + "out.bias", ("hidden",), when="recurrent", hf=_BLOCK + "linear_out.bias"),
)  # fmt: skip
_MODULES = {
    "input_layernorm": "temporal_pre_norm",
    "self_attn.": "temporal_block.",
    "post_attention_layernorm": "channel_pre_norm",
    "mlp.": "mlp_block.",
    "model.norm": "model.final_norm",
}
_INPUT_NORM, *_PROJECTIONS = without_rows(ATTENTION, "layers.{l}.attn.{q|k}_norm.weight")
_LAYERS = (_INPUT_NORM, *rows_of("attention", tuple(_PROJECTIONS)), *MLP)
ROWS = hf_only((*with_modules((EMBEDDING, *_LAYERS, *HEAD), _MODULES), *_RECURRENT))

_BLOCKS, _OLDER_BLOCKS, _WINDOW = "block_types", "_block_types", "attention_window_size"
_USUAL_BLOCKS = ["recurrent", "recurrent", "attention"]


def _mixers(key: str, words: Any, layers: int) -> tuple[str, ...]:
    """The mixer of each layer, by words that are repeated. Raises CorruptCheckpoint for other words."""
    is_list = isinstance(words, list) and words
    if not is_list or not {*words} <= {"recurrent", "attention"}:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} should list recurrent and attention, found {words!r:.80}"
        )
    return tuple(words[layer % len(words)] for layer in range(layers))


def _read_layers(raw: Raw) -> Fields:
    """The mixer of each layer. Only attention has a window. Some published files have the older key alone."""
    layers = need_size(raw, "num_hidden_layers", 26)
    words = raw.get(_BLOCKS) or _USUAL_BLOCKS
    mixers = _mixers(_BLOCKS, words, layers)
    older = raw.get(_OLDER_BLOCKS) or words
    if _mixers(_OLDER_BLOCKS, older, layers) != mixers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_OLDER_BLOCKS} is {older!r:.80}, but transformers' class computes with {_BLOCKS} {words!r:.80}; "
            f"write {_BLOCKS} with the words of the trained model, and leave {_OLDER_BLOCKS} out"
        )
    window = need_size(raw, _WINDOW, 2048)
    windows = tuple(window if mixer == "attention" else None for mixer in mixers)
    return {"layers.mixer": one_or_each(mixers), "layers.window": one_or_each(windows)}


def _write_layers(config: ModelConfig) -> Raw:
    """A word for each layer. mlx-lm and transformers repeat them, which changes nothing."""
    return {_BLOCKS: [kind.mixer for kind in config.layers], _WINDOW: config.window or 2048}


def _read_heads(raw: Raw) -> Fields:
    hidden, heads = need_size(raw, "hidden_size", 2560), need_size(raw, "num_attention_heads", 10)
    groups = need_size(raw, "num_key_value_heads", heads)
    width = need_size(raw, "lru_width", hidden)
    for name, count, whole in (
        ("hidden_size", heads, hidden),
        ("lru_width", heads, width),
        ("num_attention_heads", groups, heads),
    ):
        if whole % count:
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {name} {whole} is no multiple of {count}")
    if raw.get("head_dim", hidden // heads) != hidden // heads:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: head_dim is {raw['head_dim']!r:.40}, but transformers' class divides hidden_size {hidden} by {heads} heads; "
            "leave head_dim out"
        )
    return {
        "attention.heads": heads,
        "attention.kv_heads": groups,
        "attention.head_dim": hidden // heads,
        "recurrent.head_dim": width // heads,
    }


def _write_heads(config: ModelConfig) -> Raw:
    return {
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "lru_width": config.attention.heads * config.recurrent.head_dim,
    }


def _read_ffn(raw: Raw) -> Fields:
    """The width of the MLP: half of intermediate_size, which counts gate and up together."""
    both = need_size(raw, "intermediate_size", 7680)
    if both % 2:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: intermediate_size {both} should be even")
    return {"mlp.ffn": both // 2}


_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_KEYS = (
    size("hidden_size", "hidden", 2560),
    size("num_hidden_layers", "layers.count", 26),
    MAX_POSITIONS,
    Keys(("intermediate_size",), _read_ffn, lambda config: {"intermediate_size": 2 * config.mlp.ffn}),
    Keys(("num_attention_heads", "num_key_value_heads", "lru_width", "head_dim"), _read_heads, _write_heads),
    Keys((_BLOCKS, _OLDER_BLOCKS, _WINDOW), _read_layers, _write_layers),
    size("conv1d_width", "recurrent.conv", 4),
    number("rms_norm_eps", "norm.epsilon", 1e-6),
    number("logits_soft_cap", "head.logit_cap", 30.0),
    choice("hidden_activation", "mlp.activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    follows("embedding_scale", lambda raw: need_size(raw, "hidden_size", 2560) ** 0.5),
    rope(10000.0),
    partial_rotation(0.5),
    *model_keys(tied=True, tokens=(2, 1, 0)),
)  # fmt: skip
_FIXED = {
    "positions.kind": "rope",
    "norm.kind": "RMSNorm",
    "mlp.gated": True,
    "mlp.bias": True,
    "attention.o_bias": True,
    "norm.zero_centered": True,
}

FAMILY = Family(
    name="recurrent_gemma",
    architectures=("RecurrentGemmaForCausalLM",),
    model_type="recurrent_gemma",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"embeddings_scale_by_sqrt_dim": True},
    aliases={"sliding_window": _WINDOW},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
