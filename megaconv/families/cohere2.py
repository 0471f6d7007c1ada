"""Command R7B and A: as Command R, with windows on three of four layers. Rope rotates these layers only."""

from dataclasses import replace

from megaconv.families.cohere import FAMILY as COHERE
from megaconv.families.cohere import FIXED, command_keys
from megaconv.families.parts.windows import rotating_windows, windows_by_layer

_WINDOWS = windows_by_layer(4096, full_every=4, pattern=("sliding_window_pattern",))

FAMILY = replace(
    COHERE, name="cohere2", architectures=("Cohere2ForCausalLM",), model_type="cohere2",
    keys=(*command_keys(10000.0, own_size=True), rotating_windows(_WINDOWS)),
    fixed={name: value for name, value in FIXED.items() if name != "attention.qk_norm_width"},
)  # fmt: skip
