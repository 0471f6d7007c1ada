"""LFM 3: a gated short convolution or attention, and a gated MLP in each layer; norms before and after both.

    hf           model.layers.{l}.{operator_norm, conv, self_attn, post_operator_norm, ffn_norm, feed_forward, post_ffn_norm}
    hf_stacked   the same, with self_attn.g_proj in place of self_attn.gate_proj

Attention has a window in some layers. Layers with a window have a rope of their own. A sigmoid scales the output of each
head. The published files name this gate gate_proj, and transformers' class g_proj. Megatron core has no such layers: these
models are converted between Hugging Face's files, and trained; core's names are those of the trainer's checkpoints.
Source: Lfm3Config, modeling_lfm3.py and conversion_mapping.py of transformers 5.23.
"""

from collections.abc import Sequence

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.lfm2 import CONVOLUTION
from megaconv.families.parts.attention_gates import with_gates
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, heads, model_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.key_changes import with_defaults
from megaconv.families.parts.keys import (
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    need_size,
    number,
    size,
)
from megaconv.families.parts.layer_mixers import LAYER_TYPES, layer_words
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.proportional_ropes import KINDS, proportional_ropes
from megaconv.families.parts.row_changes import in_core, respelled, with_modules, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row

_HF, _CORE = "model.layers.{l}.", "decoder.layers.{l}."
_MODULES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.{gate|up}_proj": "feed_forward.{w1|w3}",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
_NORMS_AFTER = (
    Row("layers.{l}.attn_output_norm.weight", ("hidden",), when="attention sandwich_norm",
        hf=_HF + "post_operator_norm.weight",
        core=_CORE + "self_attention.linear_proj.post_layernorm.weight"),
    Row("layers.{l}.attn_output_norm.weight", ("hidden",), when="convolution sandwich_norm",
        hf=_HF + "post_operator_norm.weight",
        core=_CORE + "short_conv.out_proj.post_layernorm.weight"),
    Row("layers.{l}.mlp_output_norm.weight", ("hidden",), when="sandwich_norm",
        hf=_HF + "post_ffn_norm.weight",
        core=_CORE + "mlp.linear_fc2.post_layernorm.weight"),
)  # fmt: skip
_ATTENTION = with_gates(rows_of("attention", ATTENTION), "gate_proj", "head_gate", optional=True)
_GATED = "layers.{l}.attn.{q|head_gate|k|v}.weight"
_OF_CLASS = {_GATED: {"hf_stacked": _HF + "self_attn.{q_proj|g_proj|k_proj|v_proj}.weight"}}
_DECODER = (EMBEDDING, *_ATTENTION, *without_biases(MLP), *HEAD)
_NAMED = respelled(with_modules(_DECODER, _MODULES), _OF_CLASS)
ROWS = in_core((*_NAMED, *CONVOLUTION, *_NORMS_AFTER))

_WINDOW = "sliding_window"
_USUAL_LAYERS, _USUAL_WINDOW = 24, 256
_FULL, _WINDOWED = KINDS
_CONVOLUTION = "conv"


def _usual_word(layer: int) -> str:
    if layer % 4 == 2:
        return _FULL
    return _WINDOWED if layer % 4 == 0 and layer > 0 else _CONVOLUTION


def _words(raw: Raw) -> Sequence[str]:
    """The word for each layer."""
    layers = need_size(raw, "num_hidden_layers", _USUAL_LAYERS)
    usual = (_usual_word(layer) for layer in range(layers))
    return layer_words(raw, (*KINDS, _CONVOLUTION), layers, lambda: list(usual))


def _read_layers(raw: Raw) -> Fields:
    words = _words(raw)
    mixers = tuple("convolution" if word == _CONVOLUTION else "attention" for word in words)
    window = None
    if _WINDOWED in words:
        window = need_size({_WINDOW: raw.get(_WINDOW, _USUAL_WINDOW)}, _WINDOW)
    windows = tuple(window if word == _WINDOWED else None for word in words)
    return {"layers.mixer": one_or_each(mixers), "layers.window": one_or_each(windows)}


def _write_layers(config: ModelConfig) -> Raw:
    words = []
    for kind in config.layers:
        if kind.mixer not in ("attention", "convolution"):
            raise NotExpressible(
                f"the model's layers.mixer has {kind.mixer!r}, which {LAYER_TYPES} can't represent"
            )
        of_attention = _FULL if kind.window is None else _WINDOWED
        words.append(of_attention if kind.mixer == "attention" else _CONVOLUTION)
    return {LAYER_TYPES: words, _WINDOW: config.window or _USUAL_WINDOW}


def _kinds(raw: Raw) -> tuple[str, ...]:
    """The kinds of attention that the model has, which need an object in rope_parameters."""
    words = _words(raw)
    return tuple(kind for kind in KINDS if kind in words)


_HEADS = with_defaults((heads(4, 128),), {"num_attention_heads": 16})
_KEYS = (
    size("hidden_size", "hidden", 2048),
    size("num_hidden_layers", "layers.count", _USUAL_LAYERS),
    size("intermediate_size", "mlp.ffn", 7680),
    size("max_position_embeddings", "max_positions", 128000),
    size("conv_L_cache", "convolution.width", 7),
    number("norm_eps", "norm.epsilon", 1e-5),
    *_HEADS,
    proportional_ropes(theta=1e6, share=0.5, local_theta=1e4, beside=1e6, needed=_kinds),
    Keys((LAYER_TYPES, _WINDOW), _read_layers, _write_layers),
    choice("use_sandwich_norm", "norm.place", {True: "both", False: "before"}, True),
    flags("use_attention_gate", ("attention.head_gate",), default=True),
    ATTENTION_BIASES,
    *with_defaults(model_keys(tied=True, tokens=(124894, 124900, 124893)), {"vocab_size": 128000}),
)
_ONLY = {"conv_bias": False, "rope_scaling": None}

FAMILY = Family(
    name="lfm3",
    architectures=("Lfm3ForCausalLM",),
    model_type="lfm3",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, "attention.qk_norm": True},
    only=_ONLY,
    aliases={"rms_norm_eps": "norm_eps"},
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
