"""Phi-3, 3.5 and 4 mini: Llama's tensors and longrope. Hugging Face fuses q, k and v in one tensor, and gate and up in
another.

Longrope divides each frequency by its own number. The numbers are short_factor for texts up to the length of the
model's first training, and long_factor for longer texts. Megatron core has nothing like it.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.families.parts.rope import partial_rotation, read_rope, rotary_percent
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.families.parts.windows import window
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_FUSED = {
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused("model.layers.{l}.self_attn.qkv_proj.weight")},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": Fused("model.layers.{l}.mlp.gate_up_proj.weight")},
}
ROWS = in_core(respelled(LLAMA_ROWS, _FUSED))

_ORIGINAL = "original_max_position_embeddings"
_FACTORS = ("short_factor", "long_factor")
_OLDER = ("su", "yarn")
"""Names of longrope in the first releases."""


def _read_rope(raw: Raw, usual_theta: float) -> Fields:
    theta, scaling = read_rope(raw, usual_theta)
    if scaling is None:
        return {"positions.theta": theta, "positions.scaling": None}
    kind = scaling["rope_type"]
    if kind not in ("longrope", *_OLDER):
        raise NotExpressible(
            f"{CONFIG_NAME}: rope scaling {kind!r} is not supported in this architecture, "
            "only longrope is"
        )
    head = need_size(raw, "hidden_size") // need_size(raw, "num_attention_heads")
    rotating = int(need_size(raw, "head_dim", head) * rotary_percent(raw, 1.0))
    pairs = rotating // 2
    for name in _FACTORS:
        if not _is_complete(scaling, name, pairs):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {name} of longrope should be {pairs} numbers, "
                f"found {scaling.get(name)!r:.80}"
            )
    given = {name: value for name, value in scaling.items() if value is not None}
    original = need_size(raw, _ORIGINAL, 4096)
    return {
        "positions.theta": theta,
        "positions.scaling": given | {"rope_type": "longrope", _ORIGINAL: original},
    }


def _is_complete(scaling: Mapping[str, Any], name: str, count: int) -> bool:
    found = scaling.get(name)
    return (
        isinstance(found, list)
        and len(found) == count
        and all(type(each) in (int, float) for each in found)
    )


def _write_rope(config: ModelConfig) -> Raw:
    """Rope in the form that transformers 4 requires: the kind is under `type`, and the object holds nothing but the
    necessary keys."""
    scaling = config.positions.scaling
    written = {"rope_theta": config.positions.theta}
    if scaling is None:
        return {**written, "rope_scaling": None, _ORIGINAL: config.max_positions}
    rotating = int(config.attention.head_dim * config.positions.rotary_percent)
    _require_longrope(scaling, rotating // 2)
    factors = {
        name: value for name, value in scaling.items() if name not in ("rope_type", _ORIGINAL)
    }
    return {
        **written,
        "rope_scaling": {"type": "longrope", **factors},
        _ORIGINAL: scaling.get(_ORIGINAL, 4096),
    }


def _require_longrope(scaling: Mapping[str, Any], count: int) -> None:
    """Raise NotExpressible for another kind of scaling, or another count of numbers."""
    complete = all(_is_complete(scaling, name, count) for name in _FACTORS)
    if scaling.get("rope_type") != "longrope" or not complete:
        raise NotExpressible(
            f"the model's positions.scaling is {dict(scaling)}, which Phi3ForCausalLM can't represent in its "
            f"{CONFIG_NAME}: it supports only longrope, with {' and '.join(_FACTORS)} of {count} numbers"
        )


def longrope(theta: float) -> Keys:
    """Rope with longrope as its only scaling. theta: the base for a config.json without one."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)
    return Keys(names, lambda raw: _read_rope(raw, theta), _write_rope)


_USUAL: Any = {"positions": 4096, "epsilon": 1e-5, "tokens": (1, 32000, 32000)}

FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    rows=ROWS,
    keys=(
        *decoder_keys(**_USUAL, rotation=longrope(10000.0), partial=partial_rotation(1.0)),
        window(None),
    ),
    fixed=LLAMA_LIKE,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
)
