"""The language model of Inkling: biases of scores that depend on the token, convolutions after sublayers, scored shared experts.

    hf            model.layers.{l}.{input_layernorm, self_attn, attn_sconv, post_attention_layernorm, mlp, mlp_sconv}, lm_head
    hf_separate   model.layers.{l}.{attn_norm, attn, attn_sconv, mlp_norm, mlp, mlp_sconv}, model.unembed

The first form is that of transformers' class, and the second one of whole models, with model.llm. in place of model. In it, the
rows of gate and up alternate. An expert's gate and up stay one canonical tensor in this order. Layers with a window have heads
of their own number and size. Megatron core has no such layers: these models are converted between Hugging Face's files. Source:
InklingTextConfig, modeling_inkling.py and conversion_mapping.py of transformers 5.24.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import SILU, model_keys
from megaconv.families.parts.deepseek_experts import SIGMOID_ROUTER, mlp_layer_types
from megaconv.families.parts.hf_config import QUANTIZATION
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    factor,
    need_number,
    need_size,
    number,
    size,
)
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.parts.windows import windows_by_words
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.table import Fused, Row, Stacked

_OWN, _HF = "layers.{l}.", "model.layers.{l}."
_OF_CLASS, _IN_FILE, _MLP = _HF + "self_attn.", _HF + "attn.", _HF + "mlp."


@dataclass(frozen=True)
class _Alternating(Fused):
    """Two canonical tensors whose rows alternate in one native tensor."""

    shape: str = ""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        shape = evaluate(self.shape, pieces.rank.sizes)
        for template in super().natives(pieces):
            yield Template(template.native._replace(shape=shape))


@dataclass(frozen=True)
class _StackedHalves(Stacked):
    """All experts in one native tensor, each with its alternating rows as two halves."""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        for template in super().natives(pieces):
            yield Template(template.native.in_order(AsHalves()))


_EMBEDDING = (
    Row("embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
        hf="model.embed_tokens.weight",
        hf_separate="model.embed.weight"),
    Row("embed_norm.weight", ("hidden",), stage="first",
        hf="model.embed_tokens.embed_norm.weight",
        hf_separate="model.embed_norm.weight"),
)  # fmt: skip
_ATTENTION = (
    Row(_OWN + "input_norm.weight", ("hidden",),
        hf=_HF + "input_layernorm.weight",
        hf_separate=_HF + "attn_norm.weight"),
    Row(_OWN + "attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", "kv_heads*head_dim hidden"), tp=0,
        hf=_OF_CLASS + "{q|k|v}_proj.weight",
        hf_separate=_IN_FILE + "{wq_du|wk_dv|wv_dv}.weight"),
    Row(_OWN + "attn.{q|k}_norm.weight", ("head_dim", "head_dim"), when="qk_norm",
        hf=_OF_CLASS + "{q|k}_norm.weight",
        hf_separate=_IN_FILE + "{q|k}_norm.weight"),
    Row(_OWN + "attn.{k|v}_conv.weight", ("kv_heads*head_dim 1 sublayer_conv",) * 2, when="sublayer_conv",
        hf=_OF_CLASS + "{k|v}_sconv.conv1d.weight",
        hf_separate=_IN_FILE + "{k|v}_sconv.weight"),
    Row(_OWN + "attn.relative.weight", ("heads*relative_width hidden",), when="relative_attention",
        hf=_OF_CLASS + "r_proj.weight",
        hf_separate=_IN_FILE + "wr_du.weight"),
    Row(_OWN + "attn.relative.profiles", ("relative_width relative_extent",), when="relative_attention",
        hf=_OF_CLASS + "rel_logits_proj.proj",
        hf_separate=_IN_FILE + "rel_logits_proj.proj"),
    Row(_OWN + "attn.o.weight", ("hidden heads*head_dim",), tp=1,
        hf=_OF_CLASS + "o_proj.weight",
        hf_separate=_IN_FILE + "wo_ud.weight"),
    Row(_OWN + "{attn|mlp}.output_conv.weight", ("hidden 1 sublayer_conv",) * 2, when="sublayer_conv",
        hf=_HF + "{attn_sconv|mlp_sconv}.conv1d.weight",
        hf_separate=_HF + "{attn_sconv|mlp_sconv}.weight"),
)  # fmt: skip
_MLPS = (
    Row(_OWN + "mlp_norm.weight", ("hidden",),
        hf=_HF + "post_attention_layernorm.weight",
        hf_separate=_HF + "mlp_norm.weight"),
    Row(_OWN + "mlp.{gate|up}.weight", ("ffn hidden", "ffn hidden"), tp=0, when="dense",
        hf=_MLP + "{gate|up}_proj.weight",
        hf_separate=_Alternating(_MLP + "w13_dn.weight", groups="ffn", shape="2*ffn hidden")),
    Row(_OWN + "mlp.down.weight", ("hidden ffn",), tp=1, when="dense",
        hf=_MLP + "down_proj.weight",
        hf_separate=_MLP + "w2_md.weight"),
    Row(_OWN + "mlp.scale", ("1",), when="dense stored_scales", hf=_MLP + "global_scale"),
    Row(_OWN + "mlp.router.weight", ("routes hidden",), when="moe", hf=_MLP + "gate.weight"),
    Row(_OWN + "mlp.router.scale", ("1",), when="moe stored_scales", hf=_MLP + "gate.global_scale"),
    Row(_OWN + "mlp.router.bias", ("experts",), when="moe router_bias",
        hf=_MLP + "gate.e_score_correction_bias",
        hf_separate=_MLP + "gate.bias"),
    Row(_OWN + "mlp.experts.{e}.gate_up.weight", ("2*moe_ffn hidden",), tp=0, when="moe",
        hf=_StackedHalves(_MLP + "experts.gate_up_proj"),
        hf_separate=Stacked(_MLP + "experts.w13_weight")),
    Row(_OWN + "mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=Stacked(_MLP + "experts.down_proj"),
        hf_separate=Stacked(_MLP + "experts.w2_weight")),
    Row(_OWN + "mlp.shared.{gate|up}.weight", ("scored_shared moe_ffn hidden",) * 2, when="moe scored_shared",
        hf=_MLP + "shared_experts.{gate|up}_proj",
        hf_separate=_Alternating(_MLP + "shared_experts.shared_w13_weight", groups="scored_shared*moe_ffn",
                                 shape="scored_shared 2*moe_ffn hidden")),
    Row(_OWN + "mlp.shared.down.weight", ("scored_shared hidden moe_ffn",), when="moe scored_shared",
        hf=_MLP + "shared_experts.down_proj",
        hf_separate=_MLP + "shared_experts.shared_w2_weight"),
)  # fmt: skip
_END = (
    Row("final_norm.weight", ("hidden",), stage="last", hf="model.norm.weight"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        hf_separate="model.unembed.weight"),
)  # fmt: skip
ROWS = hf_only((*_EMBEDDING, *_ATTENTION, *_MLPS, *_END))

_WORDS = ("hybrid", "hybrid_sliding")
_LAYERS, _LOCAL = 66, "local_layer_ids"


def _usual_words(raw: Raw, layers: int) -> list[str]:
    """The words without layer_types: local_layer_ids lists the layers with a window. Without it, each sixth has none."""
    listed: Any = raw.get(_LOCAL)
    local = [layer for layer in range(layers) if (layer + 1) % 6] if listed is None else listed
    if not isinstance(local, list):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_LOCAL} should list numbers of layers, found {local!r:.60}"
        )
    return [_WORDS[layer in local] for layer in range(layers)]


_WINDOWS = windows_by_words(
    _WORDS, "sliding_window_size", _usual_words, layers=_LAYERS, window=512, others=(_LOCAL,)
)
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_USUAL = dict(zip(_HEADS, (64, 8, 128), strict=True))
_OF_WINDOWS = {f"swa_{key}": default for key, default in zip(_HEADS, (64, 16, 128), strict=True)}
_FIELDS = ("heads", "kv_heads", "head_dim")


def _sizes(raw: Raw, usual: dict[str, int]) -> dict[str, int]:
    """Field -> size, of the heads that these keys describe. Raises CorruptCheckpoint if key/value heads can't be shared."""
    sizes = [need_size(raw, key, default) for key, default in usual.items()]
    heads, kv_heads, _ = sizes
    if heads % kv_heads:
        key, kv_key, _ = usual
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {kv_key} {kv_heads} doesn't divide {key} {heads}")
    return dict(zip(_FIELDS, sizes, strict=True))


def _read_heads(raw: Raw) -> Fields:
    full, windowed = _sizes(raw, _USUAL), _sizes(raw, _OF_WINDOWS)
    layers = need_size(raw, "num_hidden_layers", _LAYERS)
    found: Any = _WINDOWS.read(raw)["layers.window"]
    each = found if isinstance(found, tuple) else (found,) * layers
    local = [layer for layer, window in enumerate(each) if window is not None]
    own = {f"layers.{name}": per_layer(local, layers, windowed[name], None) for name in _FIELDS}
    return {f"attention.{name}": full[name] for name in _FIELDS} | own


def _write_heads(config: ModelConfig) -> Raw:
    """The sizes of both kinds of layers. Those of a kind that the model lacks are those of the other."""
    full = {name: getattr(config.attention, name) for name in _FIELDS}
    local = next(iter(config.layers_with("window")), None)
    windowed = full | ({} if local is None else config.own_sizes(local))
    return {
        **{key: full[name] for key, name in zip(_USUAL, _FIELDS, strict=True)},
        **{key: windowed[name] for key, name in zip(_OF_WINDOWS, _FIELDS, strict=True)},
    }


_FLOOR, _ALPHA = "log_scaling_n_floor", "log_scaling_alpha"


def _read_growth(raw: Raw) -> Fields:
    """The factor on scores that grows with the position. Without log_scaling_n_floor there is none."""
    if raw.get(_FLOOR) is None:
        return {}
    return {
        "temperature.scale": need_number(raw, _ALPHA, 0.1),
        "temperature.interval": need_size(raw, _FLOOR),
        "temperature.from_interval": True,
    }


def _write_growth(config: ModelConfig) -> Raw:
    growth = config.temperature
    return {_FLOOR: growth.interval, _ALPHA: growth.scale} if growth.scale else {_FLOOR: None}


_WIDTH, _OF_EXPERTS, _OF_DENSE = "intermediate_size", "moe_intermediate_size", "dense_intermediate_size"  # fmt: skip


def _read_widths(raw: Raw) -> Fields:
    """The widths of MLPs and experts. With dense_intermediate_size, as in published files, intermediate_size is of experts."""
    width = need_size(raw, _WIDTH, 24576)
    if raw.get(_OF_DENSE) is not None:
        return {"mlp.ffn": need_size(raw, _OF_DENSE), "experts.ffn": width}
    return {"mlp.ffn": width, "experts.ffn": need_size(raw, _OF_EXPERTS, 3072)}


_VOCAB, _UNPADDED = "vocab_size", "unpadded_vocab_size"


def _read_unpadded(raw: Raw) -> Fields:
    vocab = need_size(raw, _VOCAB, 201024)
    return {"head.left_out": max(0, vocab - need_size(raw, _UNPADDED, vocab))}


def _write_unpadded(config: ModelConfig) -> Raw:
    left_out = config.head.left_out
    return {_UNPADDED: config.vocab - left_out if left_out else None}


_KINDS = mlp_layer_types(dense=0, older="dense_mlp_idx")
_DIVISOR = "logits_mup_width_multiplier"
_OF_MTP = ("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids")  # fmt: skip
_WITHOUT_EFFECT = ("rms_norm_eps_moe_gate", *_OF_MTP)
"""Keys that the class doesn't compute with, and those of layers that are left out."""
_MODEL = without_keys(model_keys(tied=False, tokens=(1, 2, None)), "tie_word_embeddings")
_KEYS = (
    size("hidden_size", "hidden", 6144),
    size("num_hidden_layers", "layers.count", _LAYERS),
    size("max_position_embeddings", "max_positions", 131072),
    number("rms_norm_eps", "norm.epsilon", 1e-6),
    *with_defaults(_MODEL, {_VOCAB: 201024}),
    _WINDOWS,
    Keys((*_USUAL, *_OF_WINDOWS), _read_heads, _write_heads),
    size("d_rel", "relative.width", 16),
    size("rel_extent", "relative.extent", 1024),
    size("conv_kernel_size", "sublayer_conv", 4),
    Keys((_FLOOR, _ALPHA), _read_growth, _write_growth),
    Keys(
        (_WIDTH, _OF_EXPERTS, _OF_DENSE),
        _read_widths,
        lambda config: {_WIDTH: config.mlp.ffn, _OF_EXPERTS: config.experts.ffn},
    ),
    Keys(
        _KINDS.names, lambda raw: _KINDS.read({"num_hidden_layers": _LAYERS, **raw}), _KINDS.write
    ),
    size("n_routed_experts", "experts.count", 256),
    size("num_experts_per_tok", "experts.per_token", 6),
    size("n_shared_experts", "experts.scored_shared", 2),
    number("route_scale", "experts.scale", 8.0),
    *with_defaults((factor(_DIVISOR, "head.divisor"),), {_DIVISOR: 24.0}),
    Keys((_UNPADDED,), _read_unpadded, _write_unpadded),
    Keys(_WITHOUT_EFFECT, lambda raw: {}, lambda config: {}),
)
_FIXED = {
    **SIGMOID_ROUTER,
    "norm.kind": "RMSNorm",
    "norm.embedding": True,
    "positions.kind": "none",
    "attention.qk_norm": True,
    "mlp.activation": "silu",
    "mlp.gated": True,
    "stored_scales": True,
}
_ALIASES = {
    "embedding_multiplier": _DIVISOR,
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "n_routed_experts",
    "sconv_kernel_size": "conv_kernel_size",
    "sliding_window": "sliding_window_size",
}

FAMILY = Family(
    name="inkling_text",
    architectures=("InklingForCausalLM",),
    model_type="inkling_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "tie_word_embeddings": False, "shared_expert_sink": True},
    aliases=_ALIASES,
    left_out={r"model\.mtp\..*": "layers for multi-token prediction"},
    features=("qk_norm",),
    describes=lambda raw: not raw.get(QUANTIZATION),
    recognized=None,
    proven="names",
)
"""Quantized files have names of scales that no source gives. They are converted under their own names."""
