"""LFM 2 and LFM 2.5: a gated short convolution or attention, and a gated MLP in each layer.

    hf     model.layers.{l}.{operator_norm, conv, self_attn, ffn_norm, feed_forward}, model.embedding_norm

model.embedding_norm follows the last layer. Megatron core has no short convolutions: these models are converted between
Hugging Face's files, and trained. Source: Lfm2Config and Lfm2ShortConv of transformers 5.
"""

from collections.abc import Sequence

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, heads, model_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_flag,
    need_number,
    need_size,
    number,
    size,
)
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.rope import FULL_ROTATION, rope
from megaconv.families.parts.row_changes import in_core, with_modules
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Row

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}.short_conv."
_MODULES = {
    "input_layernorm": "operator_norm",
    "{q|k}_norm": "{q|k}_layernorm",
    "o_proj": "out_proj",
    "post_attention_layernorm": "ffn_norm",
    "mlp.{gate|up}_proj": "feed_forward.{w1|w3}",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
_LLAMA = tuple(row for row in LLAMA_ROWS if not row.canonical.endswith(".bias"))
_EMBEDDING, *_LAYERS, _FINAL_NORM, _HEAD = with_modules(_LLAMA, _MODULES)
_ATTENTION = [row for row in _LAYERS if ".attn." in row.canonical or "input_norm" in row.canonical]
MLP = tuple(row for row in _LAYERS if row not in _ATTENTION)
"""The rows of the dense MLP under LFM 2's names."""
CONVOLUTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",), when="convolution",
        hf=_HF + "operator_norm.weight",
        core=_CORE + "in_proj.layer_norm_weight",
        core_local="decoder.layers.{l}.input_layernorm.weight"),
    Row("layers.{l}.short_conv.{b|c|x}.weight", ("conv_channels hidden", "conv_channels hidden", "conv_channels hidden"), tp=0,
        when="convolution",
        hf=Fused(_HF + "conv.in_proj.weight"),
        core=Fused(_CORE + "in_proj.weight")),
    Row("layers.{l}.short_conv.conv.weight", ("conv_channels 1 conv_width",), tp=0, when="convolution",
        hf=_HF + "conv.conv.weight",
        core=_CORE + "conv1d.weight"),
    Row("layers.{l}.short_conv.o.weight", ("hidden conv_channels",), tp=1, when="convolution",
        hf=_HF + "conv.out_proj.weight",
        core=_CORE + "out_proj.weight"),
)  # fmt: skip
MIXERS = in_core((*rows_of("attention", tuple(_ATTENTION)), *CONVOLUTION))
"""The rows of attention and of short convolutions, each with the norm before it."""
ENDS = in_core((_EMBEDDING, _FINAL_NORM, _HEAD))

_WIDTH, _ADJUSTED, _MULTIPLE, _FACTOR = (
    "intermediate_size", "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"
)  # fmt: skip


def _read_width(raw: Raw) -> Fields:
    """The MLP's width: two thirds of intermediate_size, times a factor, rounded up, unless it isn't adjusted."""
    width = need_size(raw, _WIDTH, 12288)
    if not need_flag(raw, _ADJUSTED, True):
        return {"mlp.ffn": width}
    width = int(2 * width / 3)
    if raw.get(_FACTOR, 1.0) is not None:
        multiple = need_size(raw, _MULTIPLE, 256)
        scaled = int(need_number(raw, _FACTOR, 1.0) * width)
        width = multiple * -(-scaled // multiple)
    if width < 1:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_WIDTH} {raw.get(_WIDTH)} gives an MLP of width {width} ({_FACTOR}, {_MULTIPLE})"
        )
    return {"mlp.ffn": width}


def _write_width(config: ModelConfig) -> Raw:
    return {_WIDTH: config.mlp.ffn, _ADJUSTED: False}


def _words(raw: Raw, layers: int) -> Sequence[str]:
    """The words for the layers by full_attn_idxs. Without it, all layers have attention."""
    attends = raw.get("full_attn_idxs")
    if attends is None:
        return ["full_attention"] * layers
    return ["full_attention" if layer in attends else "conv" for layer in range(layers)]


WORDS = {"full_attention": "attention", "conv": "convolution"}
"""Word for a layer -> mixer."""
SHARED_KEYS = (
    size("num_hidden_layers", "layers.count", 32),
    size("max_position_embeddings", "max_positions", 128000),
    size("conv_L_cache", "convolution.width", 3),
    number("norm_eps", "norm.epsilon", 1e-5),
    heads(8),
    rope(1000000.0),
    FULL_ROTATION,
    *model_keys(tied=True, tokens=(1, 2, 0)),
)
"""The keys that LFM 2 has with experts and without."""
_KEYS = (
    size("hidden_size", "hidden", 2560),
    *SHARED_KEYS,
    Keys((_WIDTH, _ADJUSTED, _MULTIPLE, _FACTOR), _read_width, _write_width),
    layer_mixers(WORDS, _words, "full_attn_idxs", layers=32),
)
FIXED = {**LLAMA_LIKE, "attention.qk_norm": True}
ONLY = {"conv_bias": False}
ALIASES = {"block_ff_dim": _WIDTH, "tie_embedding": "tie_word_embeddings"}

FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    model_type="lfm2",
    rows=(*ENDS[:1], *MIXERS, *in_core(MLP), *ENDS[1:]),
    keys=_KEYS,
    fixed=FIXED,
    only=ONLY,
    aliases=ALIASES,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
