"""Zamba 1: Mamba 1 with heads in each layer, and one block of attention and an MLP that some layers share.

    model.layers.{l}.{input_layernorm, mamba}                                         layers without the block
    model.layers.{l}.{mamba_decoder.input_layernorm, mamba_decoder.mamba, linear}     layers with the block
    model.layers.{h}.shared_transf.{input_layernorm, self_attn, pre_ff_layernorm, feed_forward}     the block

The first layer h with the block holds its tensors. Unlike in Mamba 1 elsewhere, x_proj and dt_proj have an axis for heads,
and the rows of x and z in in_proj alternate. Megatron core has no such layers: these models are converted between Hugging
Face's files. Source: ZambaConfig and modeling_zamba.py of transformers 5.24.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.mamba1 import time_step_rank
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.zamba2 import ACTIVATIONS, require_derived
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Copied, Row

_HF, _MAMBA, _OWN = "model.layers.{l}.", "layers.{l}.mamba1.", "layers.{l}.block."
_BLOCK = "model.layers.{=block_holder}.shared_transf."
_WIDE, _KV_WIDE = "heads*head_dim", "kv_heads*head_dim"


def _mamba_rows(norm: str, mixer: str) -> tuple[Row, ...]:
    """The rows of a Mamba 1 with heads. norm, mixer: as in parts/mamba1.py."""
    by_head = "mamba1_heads mamba1_head_dim"
    return (
        Row("layers.{l}.input_norm.weight", ("hidden",), hf=norm + "weight"),
        Row(_MAMBA + "xz.weight", ("2*mamba1_width hidden",), hf=mixer + "in_proj.weight"),
        Row(_MAMBA + "xz.bias", ("2*mamba1_width",), when="mamba1_bias", hf=mixer + "in_proj.bias"),
        Row(_MAMBA + "conv.weight", ("mamba1_width 1 mamba1_conv",), hf=mixer + "conv1d.weight"),
        Row(_MAMBA + "conv.bias", ("mamba1_width",), when="mamba1_conv_bias", hf=mixer + "conv1d.bias"),
        Row(_MAMBA + "dt_B_C.weight", ("mamba1_heads mamba1_inputs mamba1_head_dim",), hf=mixer + "x_proj_weight"),
        Row(_MAMBA + "dt_up.weight", (f"{by_head} mamba1_rank",), hf=mixer + "dt_proj_weight"),
        Row(_MAMBA + "dt_up.bias", (by_head,), hf=mixer + "dt_proj_bias"),
        Row(_MAMBA + "A_log", (f"{by_head} mamba1_state",), hf=mixer + "A_log"),
        Row(_MAMBA + "D", (by_head,), hf=mixer + "D"),
        Row(_MAMBA + "out.weight", ("hidden mamba1_width",), hf=mixer + "out_proj.weight"),
        Row(_MAMBA + "out.bias", ("hidden",), when="mamba1_bias", hf=mixer + "out_proj.bias"),
    )  # fmt: skip


_MIXERS = (
    *rows_of("!block", _mamba_rows(_HF + "input_layernorm.", _HF + "mamba.")),
    *rows_of("block", _mamba_rows(_HF + "mamba_decoder.input_layernorm.", _HF + "mamba_decoder.mamba.")),
)  # fmt: skip
_OF_BLOCK = (
    Row(_OWN + "input_norm.weight", ("2*hidden",), hf=_BLOCK + "input_layernorm.weight"),
    Row(_OWN + "attn.{q|k|v}.weight", (f"{_WIDE} 2*hidden", f"{_KV_WIDE} 2*hidden", f"{_KV_WIDE} 2*hidden"),
        hf=_BLOCK + "self_attn.{q|k|v}_proj.weight"),
    Row(_OWN + "attn.o.weight", (f"hidden {_WIDE}",), hf=_BLOCK + "self_attn.o_proj.weight"),
    Row(_OWN + "mlp_norm.weight", ("hidden",), hf=_BLOCK + "pre_ff_layernorm.weight"),
    Row(_OWN + "mlp.{gate|up}.weight", ("ffn hidden",) * 2, hf=_BLOCK + "feed_forward.{gate|up}_proj.weight"),
    Row(_OWN + "mlp.down.weight", ("hidden ffn",), hf=_BLOCK + "feed_forward.down_proj.weight"),
)  # fmt: skip
_SHARED = tuple(replace(row, copies=(Copied("uses"),)) for row in rows_of("holds_block", _OF_BLOCK))
_OUT = Row(_OWN + "out.weight", ("hidden hidden",), when="block", hf=_HF + "linear.weight")
_FINAL_NORM = HEAD[0].renamed(hf="model.final_layernorm.weight")
ROWS = hf_only((EMBEDDING, *_SHARED, _OUT, *_MIXERS, _FINAL_NORM, HEAD[1]))

_COUNT, _TYPES = "num_hidden_layers", "layers_block_type"
_PERIOD, _FIRST = "attn_layer_period", "attn_layer_offset"
_WORDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_START = ["mamba", "mamba", "hybrid"]
"""The first layers, before those of the pattern."""


def _usual_words(raw: Raw, layers: int) -> list[str]:
    """The layers without layers_block_type: after the first ones, each attn_layer_period-th has the block."""
    period, first = need_size(raw, _PERIOD, 6), raw.get(_FIRST, 4)
    if type(first) is not int or first < 0:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_FIRST} should be a number from 0, found {first!r:.40}"
        )
    rest = range(layers - len(_START))
    return [*_START, *("hybrid" if layer % period == first else "mamba" for layer in rest)]


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, _COUNT, 76)
    words = raw.get(_TYPES) or _usual_words(raw, layers)
    require_each_layer(_TYPES, words, layers)
    for word in words:
        if word not in _WORDS:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_TYPES} has {word!r:.40}, which this architecture doesn't support; expected mamba or hybrid"
            )
    blocks = tuple(_WORDS[word] for word in words)
    return {
        "layers.count": layers,
        "layers.block": one_or_each(blocks),
        "blocks.count": 1 if any(blocks) else 0,
    }


def _write_layers(config: ModelConfig) -> Raw:
    """The words that all releases of transformers read."""
    words = ["hybrid" if kind.block else "mamba" for kind in config.layers]
    return {_COUNT: config.layer_count, _TYPES: words}


_HIDDEN, _HEADS, _KV_HEADS = "hidden_size", "num_attention_heads", "num_key_value_heads"
_HEAD_DIM, _INPUT = "attention_head_dim", "attention_hidden_size"


def _read_attention(raw: Raw) -> Fields:
    """The heads of the block, which reads twice the hidden size. Scores are scaled as if heads were half as wide."""
    width = 2 * need_size(raw, _HIDDEN, 3712)
    require_derived(raw, _INPUT, width)
    count, groups = need_size(raw, _HEADS, 16), need_size(raw, _KV_HEADS, 16)
    if count % groups:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_KV_HEADS} {groups} doesn't divide {_HEADS} {count}"
        )
    head_dim = need_size(raw, _HEAD_DIM, width // count)
    return {
        "attention.heads": count,
        "attention.kv_heads": groups,
        "attention.head_dim": head_dim,
        "attention.scale": (head_dim / 2) ** -0.5,
    }


def _write_attention(config: ModelConfig) -> Raw:
    sizes = config.attention
    return {_HEADS: sizes.heads, _KV_HEADS: sizes.kv_heads, _HEAD_DIM: sizes.head_dim}


_EXPAND, _RANK, _MAMBA_HEADS = "mamba_expand", "mamba_dt_rank", "n_mamba_heads"


def _read_mamba(raw: Raw) -> Fields:
    hidden, heads = need_size(raw, _HIDDEN, 3712), need_size(raw, _MAMBA_HEADS, 2)
    width = need_size(raw, _EXPAND, 2) * hidden
    if width % heads:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_MAMBA_HEADS} {heads} doesn't divide {width}, {_EXPAND} times the hidden size"
        )
    return {"mamba1.width": width, "mamba1.heads": heads, **time_step_rank(raw, _RANK, hidden)}


def _write_mamba(config: ModelConfig) -> Raw:
    mamba = config.mamba1
    expand, rest = divmod(mamba.width, config.hidden)
    if rest or not expand:
        raise NotExpressible(
            f"the model's mamba1.width is {mamba.width}, which is no multiple ({_EXPAND}) of the hidden size {config.hidden}"
        )
    return {_MAMBA_HEADS: mamba.heads, _EXPAND: expand, _RANK: mamba.rank}


_TIED = "tie_word_embeddings"
_KEYS = (
    size(_HIDDEN, "hidden", 3712),
    size("intermediate_size", "mlp.ffn", 14848),
    Keys((_COUNT, _TYPES, _PERIOD, _FIRST), _read_layers, _write_layers),
    Keys((_HEADS, _KV_HEADS, _HEAD_DIM, _INPUT), _read_attention, _write_attention),
    Keys((_MAMBA_HEADS, _EXPAND, _RANK), _read_mamba, _write_mamba),
    size("mamba_d_state", "mamba1.state", 16),
    size("mamba_d_conv", "mamba1.conv", 4),
    flags("mamba_conv_bias", ("mamba1.conv_bias",), default=True),
    flags("mamba_proj_bias", ("mamba1.bias",), default=False),
    choice("hidden_act", "mlp.activation", ACTIVATIONS, "gelu"),
    size("max_position_embeddings", "max_positions", 4096),
    number("rms_norm_eps", "norm.epsilon", 1e-5),
    *without_keys(model_keys(tied=True, tokens=(1, 2, 0)), _TIED),
)
_FIXED = {
    "norm.kind": "RMSNorm",
    "positions.kind": "none",
    "mlp.gated": True,
    "layers.mixer": "mamba1",
    "layers.mlp": "none",
    "tie_embeddings": True,
}

FAMILY = Family(
    name="zamba",
    architectures=("ZambaForCausalLM",),
    model_type="zamba",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={_TIED: True, "hidden_mamba_act": "silu"},
    aliases={"layer_types": _TYPES, "head_dim": _HEAD_DIM},
    recognized=None,
    proven="names",
)
"""Without a tied head, transformers' class doesn't share the block either."""
