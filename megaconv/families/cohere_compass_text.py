"""Cohere Compass, the language model of North Micro Vision: Command A's layers, with a rope of halves for each kind of layers.

Source: CohereCompassTextConfig and modeling_cohere_compass.py of transformers 5.23.
"""

from dataclasses import replace

from megaconv.families.cohere import FAMILY as COHERE
from megaconv.families.cohere import FIXED, command_keys
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, multiplier
from megaconv.families.parts.ropes_or_none import ropes_or_none
from megaconv.families.parts.windows import windows_by_layer

_ROPE, _THETA = "rope_parameters", 10000.0
_ROPES = ropes_or_none(_THETA, windows_by_layer(4096, full_every=1))
_SCALE = multiplier("logit_scale", "head.divisor")


def _read_scale(raw: Raw) -> Fields:
    """The factor on logits; null means 1."""
    return _SCALE.read({} if raw.get("logit_scale") is None else raw)


_COMMAND = without_keys(command_keys(_THETA, own_size=True), _ROPE, "logit_scale")
_KEYS = (
    *_COMMAND,
    _ROPES,
    Keys(_SCALE.names, _read_scale, _SCALE.write),
)
_FIXED = {
    name: value
    for name, value in FIXED.items()
    if name not in ("attention.qk_norm_width", "positions.interleaved")
}

FAMILY = replace(
    COHERE, name="cohere_compass_text", architectures=("CohereCompassForCausalLM",), model_type="cohere_compass_text", keys=_KEYS,
    fixed=_FIXED,
)  # fmt: skip
