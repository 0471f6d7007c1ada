"""Step 3.5, and the language model of Step 3.7: layers with a window have more heads and another rope than the others.

A number per head gates attention's output. The last layers limit their activations. The published files hold each
layer's experts in three tensors, and transformers in two:

    hf           model.layers.{l}.moe.{gate, router_bias, gate_proj, up_proj, down_proj}, share_expert
    hf_stacked   model.layers.{l}.mlp.{gate, gate.e_score_correction_bias, experts.{gate_up_proj, down_proj}, shared_experts}

Megatron core has no such layers. These models are converted between Hugging Face's files, and trained; core's names are
those of the trainer's checkpoints. Layers for multi-token prediction are left out. transformers has a class for Step 3.7
alone; older keys are those of the repository stepfun-ai/Step-3.5-Flash.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.attention_gates import with_gates
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, heads, model_keys
from megaconv.families.parts.deepseek_experts import MIXTURE_ROWS, ROUTER_BIAS, SIGMOID_ROUTER
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_number,
    need_positive,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.mtp import layers_after_the_last
from megaconv.families.parts.rope import read_rope
from megaconv.families.parts.row_changes import in_core, respelled, without_biases
from megaconv.families.parts.windows import layer_types, windowed_layers, windows_on
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each, per_layer
from megaconv.model.table import Stacked

_HF = "model.layers.{l}."
_MOE, _MLP, _SHARED = _HF + "moe.", _HF + "mlp.", _HF + "share_expert."
_NAMES: dict[str, dict[str, Any]] = {
    "layers.{l}.mlp.router.weight": {"hf": _MOE + "gate.weight"},
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {
        "hf": (Stacked(_MOE + "gate_proj.weight", members=(0,)), Stacked(_MOE + "up_proj.weight", members=(1,))),
    },
    "layers.{l}.mlp.experts.{e}.down.weight": {"hf": Stacked(_MOE + "down_proj.weight")},
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": _SHARED + "{gate_proj|up_proj}.weight",
        "hf_stacked": _MLP + "shared_experts.{gate_proj|up_proj}.weight",
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _SHARED + "down_proj.weight",
        "hf_stacked": _MLP + "shared_experts.down_proj.weight",
    },
}  # fmt: skip
_BIAS = ROUTER_BIAS.renamed(
    hf=_MOE + "router_bias", hf_stacked=_MLP + "gate.e_score_correction_bias"
)
_USUAL = without_biases(tuple(row for row in MIXTURE_ROWS if row is not ROUTER_BIAS))
_GATED = with_gates(_USUAL, "g_proj", "head_gate")
ROWS = in_core((*respelled(_GATED, _NAMES), _BIAS))

_TYPES, _WINDOW, _HEADS, _OTHER, _EACH = (
    "layer_types", "sliding_window", "num_sliding_attention_heads", "attention_other_setting", "per_layer_config",
)  # fmt: skip
_MLPS, _ENUM, _LIMITS, _SHARED_LIMITS = "mlp_layer_types", "moe_layers_enum", "swiglu_limits", "swiglu_limits_shared"  # fmt: skip
_FURTHER = "num_nextn_predict_layers"
_OF_FURTHER = ("mtp_layer_types", "mtp_mlp_layer_types")
"""Keys of the layers that predict further tokens, which are left out."""
_KINDS = ("full_attention", "sliding_attention")


def _of_layers(raw: Raw, key: str, usual: list[Any]) -> list[Any]:
    """A list with a value for each layer. Older files also have values for the layers that predict further tokens."""
    layers, further = len(usual), raw.get(_FURTHER) or 0
    listed = raw.get(key) or usual
    if not isinstance(listed, list):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a list, found {listed!r:.60}")
    found = listed[:layers] if len(listed) == layers + further else listed
    require_each_layer(key, found, layers)
    return found


def _windowed(raw: Raw) -> tuple[int, ...]:
    usual = [_KINDS[0]] * need_size(raw, "num_hidden_layers")
    return windowed_layers({**raw, _TYPES: _of_layers(raw, _TYPES, usual)}, usual)


def _read_windows(raw: Raw) -> Fields:
    """The windows, and the heads of the layers with one."""
    layers, windowed = need_size(raw, "num_hidden_layers"), _windowed(raw)
    usual = need_size(raw, "num_attention_heads")
    other = _other_setting(raw)
    own = need_size(raw, _HEADS, need_size(other, "num_attention_heads", usual))
    listed: Any = raw.get(_EACH, {str(layer): {"num_attention_heads": own} for layer in windowed})
    counts = [
        need_size(listed.get(str(layer), {}), "num_attention_heads", usual)
        for layer in range(layers)
    ]
    groups = need_size(raw, "num_key_value_heads", 8)
    for count in counts:
        if count % groups:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: a layer has {count} heads (num_attention_heads, {_HEADS}); expected a multiple of the {groups} "
                "key/value heads"
            )
    different = tuple(None if count == usual else count for count in counts)
    found = (
        windows_on(raw, windowed, need_size(raw, _WINDOW)) if windowed else {"layers.window": None}
    )
    return {**found, "layers.heads": one_or_each(different)}


def _other_setting(raw: Raw) -> Mapping[str, Any]:
    """The older key for layers with a window. Raises NotExpressible for anything but another number of heads."""
    other = raw.get(_OTHER) or {}
    for key, own in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if key in other and raw.get(own, other[key]) != other[key]:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_OTHER} has {key} {other[key]!r}, which is not supported, only the model's own is"
            )
    return other


def _write_windows(config: ModelConfig) -> Raw:
    own = next((kind.heads for kind in config.layers if kind.window is not None), None)
    return {
        _TYPES: layer_types(config),
        _WINDOW: config.window,
        _HEADS: own or config.attention.heads,
    }


def _read_mlps(raw: Raw) -> Fields:
    """The layers with experts: those that a list names, or all from the fourth on."""
    layers = need_size(raw, "num_hidden_layers")
    stated = raw.get(_ENUM)
    named = stated.split(",") if isinstance(stated, str) else stated or []
    sparse = (
        [int(layer) for layer in named if str(layer).strip()]
        if stated is not None
        else range(3, layers)
    )
    usual = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
    words = _of_layers(raw, _MLPS, usual)
    if set(words) - {"sparse", "dense"}:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_MLPS} should have 'dense' and 'sparse', found {words!r:.80}"
        )
    chosen = [layer for layer, word in enumerate(words) if word == "sparse"]
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _write_mlps(config: ModelConfig) -> Raw:
    return {_MLPS: ["sparse" if kind.mlp == "experts" else "dense" for kind in config.layers]}


def _limits(key: str, field: str) -> Keys:
    """Limits of activations, layer by layer. 0 and null mean none."""

    def read(raw: Raw) -> Fields:
        listed = _of_layers(raw, key, [None] * need_size(raw, "num_hidden_layers"))
        found = (need_number({key: limit or 0.0}, key, 0.0) or None for limit in listed)
        return {f"layers.{field}": one_or_each(tuple(found))}

    def write(config: ModelConfig) -> Raw:
        limits = [getattr(kind, field) or 0.0 for kind in config.layers]
        return {key: limits if any(limits) else None}

    return Keys((key,), read, write)


_ROPES = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factors")


def _stated_ropes(raw: Raw, layers_of: Mapping[str, list[int]]) -> Mapping[str, Any]:
    """The rope objects by kind of layers, as transformers 5 has them. Like transformers, none of them counts if a kind
    that has layers is missing."""
    stated = raw.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: rope_parameters should be an object, found {stated!r:.80}"
        )
    present = [kind for kind, layers in layers_of.items() if layers]
    complete = all(isinstance(stated.get(kind), dict) for kind in present)
    return {kind: stated[kind] for kind in present} if complete else {}


def _older_rope(raw: Raw, kind: str, layers: list[int]) -> dict[str, Any]:
    """The rope object of one kind of layers, from the lists of older files."""
    count = need_size(raw, "num_hidden_layers")
    theta = raw.get("rope_theta", 10000.0)
    thetas = _of_layers(
        {**raw, "rope_theta": theta if isinstance(theta, list) else None},
        "rope_theta",
        [theta] * count,
    )
    shares = _of_layers(raw, "partial_rotary_factors", [1.0] * count)
    found = {(thetas[layer], shares[layer]) for layer in layers}
    if len(found) > 1:
        raise NotExpressible(
            f"{CONFIG_NAME}: rope_theta and partial_rotary_factors differ between layers of {kind}"
        )
    base, share = found.pop() if found else (thetas[0], shares[0])
    scaling = (raw.get("rope_scaling") or {}) if kind == _KINDS[0] else {}
    return {"rope_theta": base, "partial_rotary_factor": share, **scaling}


def _read_ropes(raw: Raw) -> Fields:
    windowed = _windowed(raw)
    full = [layer for layer in range(need_size(raw, "num_hidden_layers")) if layer not in windowed]
    layers_of = dict(zip(_KINDS, (full, list(windowed)), strict=True))
    stated = _stated_ropes(raw, layers_of)
    ropes = [stated.get(kind) or _older_rope(raw, kind, layers_of[kind]) for kind in _KINDS]
    (base, scaling), (local_base, local_scaling) = (
        read_rope({"rope_parameters": rope}, 10000.0) for rope in ropes
    )
    share, local_share = (need_number(rope, "partial_rotary_factor", 1.0) for rope in ropes)
    if local_scaling is not None:
        raise NotExpressible(
            f"{CONFIG_NAME}: rope scaling of layers with a window is not supported: {local_scaling}"
        )
    own = {"positions.local_theta": local_base} if windowed else {}
    if windowed and local_share != share:
        own |= {"positions.local_rotary_percent": local_share}
    return {
        "positions.theta": base,
        "positions.scaling": scaling,
        "positions.rotary_percent": share,
        **own,
    }


def _write_ropes(config: ModelConfig) -> Raw:
    found = config.positions
    base = found.theta if found.local_theta is None else found.local_theta
    share = (
        found.rotary_percent if found.local_rotary_percent is None else found.local_rotary_percent
    )
    scaling = {"rope_type": "default", **(found.scaling or {})}
    full = {**scaling, "rope_theta": found.theta, "partial_rotary_factor": found.rotary_percent}
    windowed = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
    return {"rope_parameters": dict(zip(_KINDS, (full, windowed), strict=True))}


_SCALAR = "query_pre_attn_scalar"


def _read_scale(raw: Raw) -> Fields:
    """The scale of attention scores: one over the root of this key, which is mostly head_dim."""
    head_dim = need_size(raw, "head_dim", 128)
    scalar = raw.get(_SCALAR) or head_dim
    return {
        "attention.scale": None
        if scalar == head_dim
        else need_positive({_SCALAR: scalar}, _SCALAR, 0.0) ** -0.5
    }


def _write_scale(config: ModelConfig) -> Raw:
    scale = config.attention.scale
    return {_SCALAR: config.attention.head_dim if scale is None else max(1, round(scale**-2))}


_KEYS = (
    size("hidden_size", "hidden", 4096),
    size("num_hidden_layers", "layers.count", 45),
    size("intermediate_size", "mlp.ffn", 11264),
    size("max_position_embeddings", "max_positions", 128000),
    number("rms_norm_eps", "norm.epsilon", 1e-5),
    heads(8, 128),
    Keys(
        (_TYPES, _WINDOW, _HEADS, _OTHER, _EACH, _FURTHER, *_OF_FURTHER),
        _read_windows,
        _write_windows,
    ),
    Keys((_MLPS, _ENUM), _read_mlps, _write_mlps),
    _limits(_LIMITS, "limit"),
    _limits(_SHARED_LIMITS, "shared_limit"),
    Keys(_ROPES, _read_ropes, _write_ropes),
    Keys((_SCALAR,), _read_scale, _write_scale),
    size("n_routed_experts", "experts.count", 288),
    size("num_experts_per_tok", "experts.per_token", 8),
    size("moe_intermediate_size", "experts.ffn", 1280),
    size("share_expert_dim", "experts.shared_ffn", 1280),
    number("moe_router_scaling_factor", "experts.scale", 1.0),
    *model_keys(tied=False, tokens=(None, None, 1)),
)
_FIXED = {**LLAMA_LIKE, **SIGMOID_ROUTER, "norm.zero_centered": True, "attention.qk_norm": True, "attention.head_gate": True}  # fmt: skip
_ONLY = {
    **SILU, "attention_bias": False, "mlp_bias": False, "use_head_wise_attn_gate": True, "use_qk_norm": True, "zero_centered": True,
    "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True, "sink": False,
    "use_bidirectional_attention": False,
}  # fmt: skip
_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": _FURTHER,
}

FAMILY = Family(
    name="step3p5",
    architectures=("Step3p5ForCausalLM",),
    model_type="step3p5",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases=_ALIASES,
    unused=layers_after_the_last,
    features=("qk_norm", "zero_centered"),
    recognized=None,
    proven="names",
)
