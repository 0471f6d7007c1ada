"""OLMo Hybrid: gated delta nets after a norm, and OLMo 3's attention without a window and before a norm; plain MLPs.

    hf     model.layers.{l}.{attention_layer_norm, linear_attn, feedforward_layer_norm, mlp}
           model.layers.{l}.{self_attn, post_attention_layernorm, mlp, post_feedforward_layernorm}

transformers 5.23 saves post_attention_layernorm of attention layers as feedforward_layer_norm too. megaconv reads both names.
It also saves the convolution in three parts of one size. megaconv refuses such files if v is wider than q, as in published
models.
Megatron core has no such norms, and its delta nets write a sigmoid, not twice a sigmoid. These models are converted
between Hugging Face's files, and trained. Source: OlmoHybridConfig and modeling_olmo_hybrid.py of transformers 5.23.
"""

from collections.abc import Collection, Mapping

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    ROPE_FREQUENCIES,
)
from megaconv.families.parts.delta_net import WORDS, linear_rows
from megaconv.families.parts.keys import Fields, Keys, Raw, flags, need_size, size
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.norm_places import normed_over_all_heads, norms_at
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, respelled, without_rows
from megaconv.model.config import ModelConfig
from megaconv.model.table import Separate, Spelling

_HF = "model.layers.{l}."
_LINEAR = _HF + "linear_attn."
_NAMES: dict[str, dict[str, Spelling]] = {
    "layers.{l}.input_norm.weight": {"hf": _HF + "attention_layer_norm.weight"},
    "layers.{l}.linear.conv.{q|k|v}.weight": {"hf": Separate(_LINEAR + "{q|k|v}_conv1d.weight")},
    "layers.{l}.linear.out_norm.weight": {"hf": _LINEAR + "o_norm.weight"},
    "layers.{l}.linear.o.weight": {"hf": _LINEAR + "o_proj.weight"},
}
_PROJECTIONS = Separate(_LINEAR + "{q_proj|k_proj|v_proj|g_proj|b_proj|a_proj}.weight")
_DELTA_NETS = respelled(linear_rows(_PROJECTIONS, zero_centered=False), _NAMES)
_MLP_NORM = MLP[0].renamed(hf=_HF + "feedforward_layer_norm.weight")
_AFTER = norms_at(
    normed_over_all_heads(ATTENTION),
    (),
    before=None,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_PLAIN_MLP = tuple(
    row for row in without_rows(MLP, MLP[0].canonical) if not row.canonical.endswith(".bias")
)
ROWS = in_core((
    EMBEDDING,
    *_DELTA_NETS,
    *rows_of("attention", _AFTER),
    *rows_of("linear", (_MLP_NORM,)),
    *_PLAIN_MLP,
    *HEAD,
))  # fmt: skip


def _usual_names(names: Collection[str]) -> Mapping[str, str]:
    """The norm after attention by its usual name: a layer without a norm before attention has no norm before the MLP."""
    found = {}
    for name in names:
        layer, saved, rest = name.partition("feedforward_layer_norm.")
        if saved and layer + "attention_layer_norm.weight" not in names:
            found[name] = f"{layer}post_attention_layernorm.{rest}"
    return found


def _words(raw: Raw, layers: int) -> list[str]:
    """The words of a model in which every fourth layer has attention, or the last one if there are fewer layers."""
    linear, full = WORDS
    words = [full if layer % 4 == 3 else linear for layer in range(layers)]
    return words if full in words else [*words[:-1], full]


_ROTATION = rope(10000.0)


def _read_positions(raw: Raw) -> Fields:
    """Rope, unless its base or its kind is null, as in the published models."""
    stated = raw.get("rope_parameters") or {}
    given = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_type": "default", **stated}
    if given["rope_theta"] is None or given["rope_type"] is None:
        return {"positions.kind": "none"}
    return {"positions.kind": "rope", **_ROTATION.read(raw)}


def _write_positions(config: ModelConfig) -> Raw:
    if config.positions.kind == "none":
        return {"rope_theta": None, "rope_parameters": {"rope_type": None, "rope_theta": None}}
    return _ROTATION.write(config)


def _read_linear(raw: Raw) -> Fields:
    """The sizes of delta nets. Missing ones follow from the hidden size and the heads of attention."""
    heads = need_size(raw, "num_attention_heads")
    key_heads = need_size(raw, "linear_num_key_heads", heads)
    usual = int(0.75 * need_size(raw, "hidden_size") / key_heads)
    key_dim = need_size(raw, "linear_key_head_dim", usual)
    return {
        "linear.key_heads": key_heads,
        "linear.value_heads": need_size(raw, "linear_num_value_heads", heads),
        "linear.key_dim": key_dim,
        "linear.value_dim": need_size(raw, "linear_value_head_dim", 2 * key_dim),
    }


_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")  # fmt: skip


def _write_linear(config: ModelConfig) -> Raw:
    linear = config.linear
    sizes = (linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim)
    return dict(zip(_SIZES, sizes, strict=True))


_POSITIONS = Keys(_ROTATION.names, _read_positions, _write_positions)
_KEYS = (
    *decoder_keys(positions=65536, rotation=_POSITIONS, tokens=(None, 100257, 100277)),
    ATTENTION_BIASES,
    layer_mixers(WORDS, _words),
    Keys(_SIZES, _read_linear, _write_linear),
    size("linear_conv_kernel_dim", "linear.conv", 4),
    flags("linear_allow_neg_eigval", ("linear.double_writes",), default=True),
)
_FIXED = {
    **{name: value for name, value in LLAMA_LIKE.items() if name != "positions.kind"},
    "norm.place": "by_mixer",
    "attention.qk_norm": True,
    "attention.qk_norm_width": "all",
    "linear.out_epsilon": 1e-5,
}

FAMILY = Family(
    name="olmo_hybrid",
    architectures=("OlmoHybridForCausalLM",),
    model_type="olmo_hybrid",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    other_names=_usual_names,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
