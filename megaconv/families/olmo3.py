"""OLMo 3: OLMo 2 with a window on three layers of four; where rope is scaled, it is on the others alone."""

from megaconv.families import Family
from megaconv.families.llama import BIASES, IGNORED
from megaconv.families.olmo2 import OLMO_2, OLMO_LIKE, ROWS
from megaconv.families.parts.decoder_keys import SILU, decoder_keys, windows_by_layer
from megaconv.families.parts.layer_ropes import layer_ropes

_KEYS = (
    *decoder_keys(positions=2048, epsilon=1e-5, rotation=layer_ropes(5e5), tokens=(None, 50279, 1)),
    BIASES,
    windows_by_layer(4096, full_every=4),
)

FAMILY = Family(
    "olmo3", ("Olmo3ForCausalLM",), "olmo3", ROWS, keys=_KEYS, fixed=OLMO_2, only=SILU, ignored=IGNORED,
    features=("qk_norm",), recognized=f"{OLMO_LIKE} windows",
    proven="custom module",
)  # fmt: skip
