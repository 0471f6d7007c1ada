"""Phi-3, 3.5 and 4 mini: Llama's tensors, with q, k, v in one and gate, up in another as Hugging Face ships them, and longrope.

Longrope divides each frequency by a number of its own: one of short_factor as long as a text isn't longer than those that the model was
first trained on, beyond that one of long_factor. Megatron core has nothing like it.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_keys import (
    LLAMA_LIKE,
    SILU,
    decoder_keys,
    partial_rotation,
    read_rope,
    rotary_percent,
    window,
)
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
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
"""What the first releases call longrope."""


def _read_rope(raw: Raw) -> Fields:
    theta, scaling = read_rope(raw, 10000.0)
    if scaling is None:
        return {"positions.theta": theta, "positions.scaling": None}
    if scaling["rope_type"] not in ("longrope", *_OLDER):
        raise NotExpressible(
            f"{CONFIG_NAME}: rope scaling {scaling['rope_type']!r} is not supported in this architecture, only longrope is"
        )
    head = need_size(raw, "hidden_size") // need_size(raw, "num_attention_heads")
    rotating = int(need_size(raw, "head_dim", head) * rotary_percent(raw, 1.0))
    for name in _FACTORS:
        if not _is_complete(scaling, name, rotating // 2):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {name} of longrope should be {rotating // 2} numbers, found {scaling.get(name)!r:.80}"
            )
    given = {name: value for name, value in scaling.items() if value is not None}
    original = need_size(raw, _ORIGINAL, 4096)
    return {"positions.theta": theta, "positions.scaling": given | {"rope_type": "longrope", _ORIGINAL: original}}


def _is_complete(scaling: Mapping[str, Any], name: str, count: int) -> bool:
    found = scaling.get(name)
    return isinstance(found, list) and len(found) == count and all(type(each) in (int, float) for each in found)


def _write_rope(config: ModelConfig) -> Raw:
    """Its type is `type` and nothing is beside the factors that needn't be: as transformers 4 wants it."""
    scaling, theta = config.positions.scaling, {"rope_theta": config.positions.theta}
    if scaling is None:
        return {**theta, "rope_scaling": None, _ORIGINAL: config.max_positions}
    count = int(config.attention.head_dim * config.positions.rotary_percent) // 2
    if scaling.get("rope_type") != "longrope" or not all(_is_complete(scaling, name, count) for name in _FACTORS):
        raise NotExpressible(
            f"the model's positions.scaling is {dict(scaling)}, which Phi3ForCausalLM can't represent in its "
            f"{CONFIG_NAME}: it supports only longrope, with {' and '.join(_FACTORS)} of {count} numbers"
        )
    kept = {name: value for name, value in scaling.items() if name not in ("rope_type", _ORIGINAL)}
    return {**theta, "rope_scaling": {"type": "longrope", **kept}, _ORIGINAL: scaling.get(_ORIGINAL, 4096)}


_ROPE = Keys(("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL), _read_rope, _write_rope)
_USUAL: Any = {"positions": 4096, "epsilon": 1e-5, "tokens": (1, 32000, 32000)}

FAMILY = Family(
    "phi3", ("Phi3ForCausalLM",), "phi3", ROWS,
    keys=(*decoder_keys(**_USUAL, rotation=_ROPE, partial=partial_rotation(1.0)), window(None)),
    fixed=LLAMA_LIKE, only=SILU, ignored=IGNORED, recognized=None,
)  # fmt: skip
