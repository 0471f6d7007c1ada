"""OLMo 3: OLMo 2 with a window on three of four layers. Rope scaling applies only to the other layers."""

from megaconv.families import Family
from megaconv.families.olmo2 import OLMO_2, OLMO_LIKE, ROWS
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.layer_ropes import layer_ropes
from megaconv.families.parts.windows import windows_by_layer

_KEYS = (
    *decoder_keys(positions=2048, epsilon=1e-5, rotation=layer_ropes(5e5), tokens=(None, 50279, 1)),
    ATTENTION_BIASES,
    windows_by_layer(4096, full_every=4),
)

FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    rows=ROWS,
    keys=_KEYS,
    fixed=OLMO_2,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{OLMO_LIKE} windows",
    proven="custom module",
)
