"""The language model of ERNIE 4.5 VL: ERNIE 4.5 with two mixtures of experts in a layer, one for text and one for images.

Each mixture has its own router with a bias. Experts for images are narrower. Shared experts work on all tokens. The published
files, which transformers writes too, number the experts of both mixtures in one list. transformers' class holds them apart:

    hf            model.layers.{l}.mlp.{text_moe|vision_moe}.{gate.weight, gate.moe_statics, experts.gate_up_proj, experts.down_proj}
    hf_separate   model.layers.{l}.mlp.{gate.weight, gate.weight_1, moe_statics, experts.{e}.gate_proj}; routers are transposed

Megatron core has no layer with two mixtures, and no router that adds a bias to softmax scores. Megatron-Bridge has a module of
its own for such a layer, and describes its routers with sigmoid scores, which is another model. These models are converted
between Hugging Face's files only. Sources: Ernie4_5_VLMoeTextConfig, modeling_ernie4_5_vl_moe.py and conversion_mapping.py of
transformers 5.23; for older files, transformers' convert_ernie4_5_vl_moe_to_hf.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import DEEPSEEK_SHARED
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    count,
    need_size,
    only_in_files,
    size,
)
from megaconv.families.parts.rope import SECTIONS, rope, sections
from megaconv.families.parts.row_changes import hf_only, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.pieces import Pieces, Template
from megaconv.model.table import Fused, Row, Separate, Stacked, Transposed


@dataclass(frozen=True)
class _AfterText(Separate):
    """Experts for images, which are numbered after as many experts for text."""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        number = f"{{e+{pieces.rank.whole['experts']}}}"
        for native, each_expert in super().natives(pieces):
            numbered = native._replace(name=native.name.replace("{e}", number))
            yield Template(numbered, each_expert=each_expert)


_MLP = "model.layers.{l}.mlp."
_EXPERT = _MLP + "experts.{e}."
_BIAS = "gate.moe_statics.e_score_correction_bias"
_MIXTURES = (
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
        hf=_MLP + "text_moe.gate.weight",
        hf_separate=Transposed(_MLP + "gate.weight")),
    Row("layers.{l}.mlp.vision.router.weight", ("experts hidden",), when="moe",
        hf=_MLP + "vision_moe.gate.weight",
        hf_separate=Transposed(_MLP + "gate.weight_1")),
    Row("layers.{l}.mlp.{text|vision}.router.bias", ("1 experts", "1 experts"), when="moe",
        hf=_MLP + "{text_moe|vision_moe}." + _BIAS,
        hf_separate=Fused(_MLP + "moe_statics.e_score_correction_bias")),
    Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn hidden", "moe_ffn hidden"), tp=0, when="moe",
        hf=Stacked(_MLP + "text_moe.experts.gate_up_proj"),
        hf_separate=_EXPERT + "{gate_proj|up_proj}.weight"),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=Stacked(_MLP + "text_moe.experts.down_proj"),
        hf_separate=_EXPERT + "down_proj.weight"),
    Row("layers.{l}.mlp.vision.experts.{e}.{gate|up}.weight", ("vision_ffn hidden", "vision_ffn hidden"), tp=0, when="moe",
        hf=Stacked(_MLP + "vision_moe.experts.gate_up_proj"),
        hf_separate=_AfterText(_EXPERT + "{gate_proj|up_proj}.weight")),
    Row("layers.{l}.mlp.vision.experts.{e}.down.weight", ("hidden vision_ffn",), tp=1, when="moe",
        hf=Stacked(_MLP + "vision_moe.experts.down_proj"),
        hf_separate=_AfterText(_EXPERT + "down_proj.weight")),
)  # fmt: skip
_DECODER = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP)
ROWS = hf_only((*without_biases(_DECODER), *_MIXTURES, *DEEPSEEK_SHARED, *HEAD))

_COUNT, _WIDTHS, _SHARED = "moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts"
_TYPES, _START, _END, _STEP = "mlp_layer_types", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"  # fmt: skip
_PAIRS_OF_TIME = "freq_allocation"


def _of_both(raw: Raw, key: str, usual: Any) -> list[Any]:
    """The values of a key for text and for images. Older files list them, newer ones have one value for both."""
    value = raw.get(key)
    value = usual if value is None else value
    both = value if isinstance(value, list) else [value, value]
    if len(both) != 2 or any(type(each) is not int for each in both):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} should be a number, or one for text and one for images, found {value!r}"
        )
    return both


def _read_experts(raw: Raw) -> Fields:
    """Experts of both kinds. Raises NotExpressible if there are more of one kind than of the other."""
    of_text, of_images = _of_both(raw, _COUNT, 64)
    if of_text != of_images:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_COUNT} is {[of_text, of_images]}; only as many experts for images as for text are supported"
        )
    wide, narrow = _of_both(raw, _WIDTHS, [1536, 512])
    # Older files have null for no shared experts. transformers' class has two if the key is missing.
    shared = count(_SHARED, "shared", 2).read(raw)["shared"]
    return {
        "experts.count": need_size({_COUNT: of_text}, _COUNT),
        "experts.ffn": need_size({_WIDTHS: wide}, _WIDTHS),
        "experts.vision_ffn": need_size({_WIDTHS: narrow}, _WIDTHS),
        "experts.shared_ffn": shared * wide,
    }


def _write_experts(config: ModelConfig) -> Raw:
    experts = config.experts
    return {
        _COUNT: experts.count,
        _WIDTHS: [experts.ffn, experts.vision_ffn],
        _SHARED: experts.shared_ffn // max(1, experts.ffn),
    }


def _read_layers(raw: Raw) -> Fields:
    """The layers with experts: those of mlp_layer_types, or of the ranges that older files have. Otherwise all but the
    first."""
    layers = need_size(raw, "num_hidden_layers")
    words = raw.get(_TYPES)
    if words is None:
        chosen = _in_ranges(raw, layers)
        return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}
    if not isinstance(words, list) or len(words) != layers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_TYPES} should list {layers} layers, found {words!r:.80}"
        )
    unknown = [word for word in words if word not in ("dense", "sparse")]
    if unknown:
        raise NotExpressible(f"{CONFIG_NAME}: {_TYPES} has {unknown[0]!r}, which is not known")
    chosen = [layer for layer, word in enumerate(words) if word == "sparse"]
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _in_ranges(raw: Raw, layers: int) -> list[int]:
    """The layers from a first to a last one. Raises NotExpressible if text and images have experts in different layers."""
    step = need_size(raw, _STEP, 1)
    starts, ends = _of_both(raw, _START, 1), _of_both(raw, _END, -1)
    found = []
    for first, last in zip(starts, ends, strict=True):
        end = layers if last == -1 else min(layers, last + 1)
        found.append([layer for layer in range(first, end) if (layer + 1) % step == 0])
    if found[0] != found[1]:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_START} {starts} and {_END} {ends} give text and images experts in different layers, which is not supported"
        )
    return found[0]


def _write_layers(config: ModelConfig) -> Raw:
    return {_TYPES: ["sparse" if kind.mlp == "experts" else "dense" for kind in config.layers]}


_ROPE = rope(5e5)


def _read_rope(raw: Raw) -> Fields:
    """Rope, and its sections for images. Raises NotExpressible for any scaling, which transformers' class refuses too."""
    found = dict(_ROPE.read(raw))
    if found["positions.scaling"] is not None:
        kind = found["positions.scaling"]["rope_type"]
        raise NotExpressible(
            f"{CONFIG_NAME}: rope scaling {kind} is not supported in this architecture"
        )
    return {**found, "positions.sections": sections(raw, _usual_sections(raw))}


def _usual_sections(raw: Raw) -> list[int]:
    """The sections of a file without mrope_section. Older files may have the number of pairs that rotate by time."""
    time = need_size(raw, _PAIRS_OF_TIME, 20)
    if time == 20:
        return [22, 22, 20]
    heads = need_size(raw, "num_attention_heads")
    width = need_size(raw, "head_dim", need_size(raw, "hidden_size") // heads)
    by_place = (width // 2 - time) // 2
    return [by_place, by_place, time]


def _write_rope(config: ModelConfig) -> Raw:
    positions = config.positions
    return {
        "rope_theta": positions.theta,
        "rope_scaling": {"rope_type": "default", SECTIONS: list(positions.sections or ())},
    }


_OLDER: Raw = {
    "rope_3d": True, "use_rmsnorm": True, "compression_ratio": 1.0, "moe_gate_act": "softmax", "moe_norm_gate_logits": True,
    "moe_group_experts": False, "moe_num_attn_experts": False, "moe_use_hard_gate": True, "moe_use_token_type_bias": False,
    "moe_dense_experts_token_type_id": 3,
}  # fmt: skip
"""Keys of Baidu's own class, which older files have -> the values that transformers' class computes."""


_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=4, ffn=12288, epsilon=1e-5, tied=True,
        rotation=Keys((*_ROPE.names, _PAIRS_OF_TIME), _read_rope, _write_rope),
    ),
    size("moe_k", "experts.per_token", 6),
    Keys((_COUNT, _WIDTHS, _SHARED), _read_experts, _write_experts),
    Keys((_TYPES, _START, _END, _STEP), _read_layers, _write_layers),
    only_in_files(_OLDER),
)  # fmt: skip
_OLDER_TYPES = ("ernie4_5_moe_vl",)
"""model_type of files for Baidu's own class, which have the keys of the language model beside the others."""

FAMILY = Family(
    name="ernie4_5_vl_moe_text",
    architectures=("Ernie4_5_VLMoeTextModel",),
    model_type="ernie4_5_vl_moe_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True, "experts.router_bias": True},
    only={**SILU, "use_bias": False, "moe_norm_min": 1e-12},
    other_types=_OLDER_TYPES,
    older_types=_OLDER_TYPES,
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
