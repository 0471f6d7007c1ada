"""Zamba 2: Mamba 2 in each layer, and blocks of attention and an MLP that several layers share, with adapters of each layer.

    model.layers.{l}.{input_layernorm, mamba}                                              layers without a block
    model.layers.{l}.{mamba_decoder.input_layernorm, mamba_decoder.mamba, linear}          layers with a block
    model.layers.{h}.shared_transformer.{input_layernorm, self_attn, pre_ff_layernorm, feed_forward}     blocks
    model.layers.{h}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{u}.{0, 1}                adapters

A block lies in the first layer h that has it, with the adapters of all layers that have it. u counts the layers with blocks.
Megatron core has no such blocks: these models are converted between Hugging Face's files. Source: Zamba2Config and
modeling_zamba2.py of transformers 5.24.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import heads, model_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    follows,
    need_flag,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.mamba import LIMITED_TIME_STEPS, TIME_STEP_LIMIT, mamba_rows
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.rope import FULL_ROTATION, rope
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Copied, Fused, Row

_HF, _OWN = "model.layers.{l}.", "layers.{l}.block."
_BLOCK = "model.layers.{=block_holder}.shared_transformer."
_ATTENTION, _MLP = _BLOCK + "self_attn.", _BLOCK + "feed_forward."
_OF_USE = "_adapter_list.{=block_use}."
_WIDE, _KV_WIDE = "heads*head_dim", "kv_heads*head_dim"
_MIXERS = (
    *rows_of("!block", mamba_rows(_HF + "input_layernorm.", _HF + "mamba.")),
    *rows_of("block", mamba_rows(_HF + "mamba_decoder.input_layernorm.", _HF + "mamba_decoder.mamba.")),
)  # fmt: skip
_BLOCKS = (
    Row(_OWN + "input_norm.weight", ("2*hidden",), when="holds_block", hf=_BLOCK + "input_layernorm.weight"),
    Row(_OWN + "attn.{q|k|v}.weight", (f"{_WIDE} 2*hidden", f"{_KV_WIDE} 2*hidden", f"{_KV_WIDE} 2*hidden"), tp=0, when="holds_block",
        hf=_ATTENTION + "{q|k|v}_proj.weight"),
    Row(_OWN + "attn.o.weight", (f"hidden {_WIDE}",), tp=1, when="holds_block", hf=_ATTENTION + "o_proj.weight"),
    Row(_OWN + "mlp_norm.weight", ("hidden",), when="holds_block", hf=_BLOCK + "pre_ff_layernorm.weight"),
    Row(_OWN + "mlp.{gate|up}.weight", ("ffn hidden",) * 2, tp=0, when="holds_block", hf=Fused(_MLP + "gate_up_proj.weight")),
    Row(_OWN + "mlp.down.weight", ("hidden ffn",), tp=1, when="holds_block", hf=_MLP + "down_proj.weight"),
    Row(_OWN + "adapter.{q|k|v}_in.weight", ("adapter_rank 2*hidden",) * 3, when="block block_adapters",
        hf=_ATTENTION + "linear_{q|k|v}" + _OF_USE + "0.weight"),
    Row(_OWN + "adapter.{q|k|v}.weight", (f"{_WIDE} adapter_rank", f"{_KV_WIDE} adapter_rank", f"{_KV_WIDE} adapter_rank"), tp=0,
        when="block block_adapters", hf=_ATTENTION + "linear_{q|k|v}" + _OF_USE + "1.weight"),
    Row(_OWN + "adapter.mlp_in.weight", ("adapter_rank hidden",), when="block", hf=_MLP + "gate_up_proj" + _OF_USE + "0.weight"),
    Row(_OWN + "adapter.{gate|up}.weight", ("ffn adapter_rank",) * 2, tp=0, when="block",
        hf=Fused(_MLP + "gate_up_proj" + _OF_USE + "1.weight")),
)  # fmt: skip
_OUT = Row(_OWN + "out.weight", ("hidden hidden",), when="block", hf=_HF + "linear.weight")
_FINAL_NORM = HEAD[0].renamed(hf="model.final_layernorm.weight")
_ALL_BLOCKS = (*(replace(row, copies=(Copied("uses"),)) for row in _BLOCKS), _OUT)
ROWS = hf_only((EMBEDDING, *_ALL_BLOCKS, *_MIXERS, _FINAL_NORM, HEAD[1]))

_COUNT, _TYPES, _WITH_BLOCKS = "num_hidden_layers", "layers_block_type", "hybrid_layer_ids"
_HIDDEN, _HEADS, _KV_HEADS = "hidden_size", "num_attention_heads", "num_key_value_heads"
_BLOCK_COUNT, _RANK, _ADAPTERS = "num_mem_blocks", "adapter_rank", "use_shared_attention_adapter"
_WORDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_SPACES = (6, 5, 5, 5, 5, 5, 5, 4, 3)
"""Layers without a block before each layer that has one, in transformers' default, which ends with two more of them."""


def require_derived(raw: Raw, key: str, expected: object) -> None:
    """Raise CorruptCheckpoint if a key that follows from others has another value. transformers' class takes such keys."""
    stated = raw.get(key, expected)
    if stated != expected:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} is {stated!r:.60}, but the other keys make it {expected!r:.60}; correct it, or leave it out"
        )


def _usual_words() -> list[str]:
    spaces = (["mamba"] * space + ["hybrid"] for space in _SPACES)
    return [word for words in spaces for word in words] + ["mamba"] * 2


def _read_layers(raw: Raw) -> Fields:
    """The layers that have a block. transformers' default words are those of 54 layers, whatever the number of layers."""
    words = raw.get(_TYPES) or _usual_words()
    for word in words:
        if word not in _WORDS:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_TYPES} has {word!r:.40}, which this architecture doesn't support; expected mamba or hybrid"
            )
    layers = need_size(raw, _COUNT, 54)
    require_each_layer(_TYPES, words, layers)
    blocks = tuple(_WORDS[word] for word in words)
    require_derived(raw, _WITH_BLOCKS, [layer for layer, block in enumerate(blocks) if block])
    return {"layers.count": layers, "layers.block": one_or_each(blocks)}


def _write_layers(config: ModelConfig) -> Raw:
    """The words that all releases of transformers read."""
    words = ["hybrid" if kind.block else "mamba" for kind in config.layers]
    return {_COUNT: config.layer_count, _TYPES: words}


_OF_HEADS = heads(None)
_DERIVED = ("attention_head_dim", "attention_hidden_size", "kv_channels", "num_query_groups")


def _read_heads(raw: Raw) -> Fields:
    """The heads of blocks, which divide twice the hidden size."""
    hidden, count = need_size(raw, _HIDDEN, 2560), need_size(raw, _HEADS, 32)
    width, rest = divmod(2 * hidden, count)
    if rest:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_HEADS} {count} doesn't divide {2 * hidden}, twice the hidden size"
        )
    sizes = {_HIDDEN: hidden, _HEADS: count, "head_dim": width}
    found = _OF_HEADS.read({_KV_HEADS: raw.get(_KV_HEADS), **sizes})
    groups = found["attention.kv_heads"]
    if groups != count and need_flag(raw, _ADAPTERS, False):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_KV_HEADS} is {groups} and {_HEADS} {count}; expected the same with {_ADAPTERS}"
        )
    derived = dict(zip(_DERIVED, (width, 2 * hidden, hidden // count, count), strict=True))
    for key, value in derived.items():
        require_derived(raw, key, value)
    return found


def _write_heads(config: ModelConfig) -> Raw:
    written = _OF_HEADS.write(config)
    return {key: written[key] for key in (_HEADS, _KV_HEADS)}


def _read_ffn(raw: Raw) -> Fields:
    usual = 4 * need_size(raw, _HIDDEN, 2560)
    return {"mlp.ffn": need_size(raw, "intermediate_size", usual)}


def _read_mamba(raw: Raw) -> Fields:
    """The heads of Mamba 2, which divide mamba_expand times the hidden size."""
    count, expand = need_size(raw, "n_mamba_heads", 8), need_size(raw, "mamba_expand", 2)
    inner = expand * need_size(raw, _HIDDEN, 2560)
    width, rest = divmod(inner, count)
    if rest:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: n_mamba_heads {count} doesn't divide {inner}, mamba_expand times the hidden size"
        )
    require_derived(raw, "mamba_headdim", width)
    return {"mamba.heads": count, "mamba.head_dim": width}


def _write_mamba(config: ModelConfig) -> Raw:
    inner = config.mamba.heads * config.mamba.head_dim
    expand, rest = divmod(inner, config.hidden)
    if rest or not expand:
        raise NotExpressible(
            f"the model's mamba.heads x mamba.head_dim is {inner}, which is no multiple (mamba_expand) of the hidden size {config.hidden}"
        )
    return {"n_mamba_heads": config.mamba.heads, "mamba_expand": expand}


def _scale(raw: Raw) -> float:
    """The factor on scores: as if heads were half as wide."""
    width = 2 * need_size(raw, _HIDDEN, 2560) // need_size(raw, _HEADS, 32)
    return float((width / 2) ** -0.5)


ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_TIED = "tie_word_embeddings"
_KEYS = (
    size(_HIDDEN, "hidden", 2560),
    Keys((_COUNT, _TYPES, _WITH_BLOCKS), _read_layers, _write_layers),
    Keys((_HEADS, _KV_HEADS, *_DERIVED), _read_heads, _write_heads),
    follows("attention.scale", _scale),
    Keys(("intermediate_size",), _read_ffn, lambda config: {"intermediate_size": config.mlp.ffn}),
    Keys(("n_mamba_heads", "mamba_expand", "mamba_headdim"), _read_mamba, _write_mamba),
    size("mamba_ngroups", "mamba.groups", 1),
    size("mamba_d_state", "mamba.state", 64),
    TIME_STEP_LIMIT,
    size(_BLOCK_COUNT, "blocks.count", 1),
    size(_RANK, "blocks.adapter_rank", 128),
    flags(_ADAPTERS, ("blocks.attention_adapters",), default=False),
    choice("hidden_act", "mlp.activation", ACTIVATIONS, "gelu"),
    choice("use_mem_rope", "positions.kind", {True: "rope", False: "none"}, False),
    rope(10000.0),
    FULL_ROTATION,
    size("max_position_embeddings", "max_positions", 4096),
    number("rms_norm_eps", "norm.epsilon", 1e-5),
    *without_keys(model_keys(tied=True, tokens=(1, 2, 0)), _TIED),
)  # fmt: skip
_FIXED = {
    **LIMITED_TIME_STEPS,
    "norm.kind": "RMSNorm",
    "mlp.gated": True,
    "layers.mixer": "mamba",
    "layers.mlp": "none",
    "mamba.out_epsilon": 1e-5,
    "tie_embeddings": True,
}
_ONLY = {
    _TIED: True,
    "add_bias_linear": False,
    "mamba_d_conv": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "use_long_context": False,
}
"""Without a tied head, transformers' class doesn't share the blocks either."""

FAMILY = Family(
    name="zamba2",
    architectures=("Zamba2ForCausalLM",),
    model_type="zamba2",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases={"layer_types": _TYPES, "head_dim": "attention_head_dim"},
    recognized=None,
    proven="names",
)
