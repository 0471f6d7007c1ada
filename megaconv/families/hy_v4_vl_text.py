"""The language model of Hunyuan V4 VL: Hunyuan V4, whose norms of latent vectors have the epsilon of all other norms.

    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}

Source: HYV4VLTextConfig and modeling_hy_v4_vl.py of transformers 5.24, which has no class of it with a head.
"""

from dataclasses import replace
from typing import Any

from megaconv.families.hy_v4 import FAMILY as HY_V4
from megaconv.families.parts.headless import EMBEDDING_ALONE, tied_without
from megaconv.families.parts.key_changes import with_defaults, with_keys
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.parts.latent_attention import LATENT_NORMS
from megaconv.families.parts.rope import SECTIONS, rope, sections
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig

_ROPE = rope(10000.0)
_USUAL = (12, 10, 10)


def _read_rope(raw: Raw) -> Fields:
    """Rope, and its sections for images."""
    found = dict(_ROPE.read(raw))
    scaling = found["positions.scaling"]
    if scaling:
        found["positions.scaling"] = {key: value for key, value in scaling.items() if key != SECTIONS}  # fmt: skip
    return {**found, "positions.sections": sections(raw, _USUAL, least=0)}


def _write_rope(config: ModelConfig) -> Raw:
    written: dict[str, Any] = dict(_ROPE.write(config))
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    own = list(config.positions.sections or _USUAL)
    return {**written, "rope_scaling": {**scaling, SECTIONS: own}}


_DEFAULTS = {
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 2048,
    "index_n_heads": 32,
}
_KEYS = with_keys(HY_V4.keys, (Keys(_ROPE.names, _read_rope, _write_rope),), "rope_theta")
_EMBEDDING, *_OTHERS = HY_V4.rows

FAMILY = replace(
    HY_V4, name="hy_v4_vl_text", architectures=("HYV4VLTextModel",), model_type="hy_v4_vl_text",
    rows=(*hf_only((EMBEDDING_ALONE,)), *_OTHERS), keys=with_defaults(_KEYS, _DEFAULTS), prefix="model.",
    fixed={name: value for name, value in HY_V4.fixed.items() if name not in LATENT_NORMS},
    complete=tied_without("lm_head.weight"),
)  # fmt: skip
