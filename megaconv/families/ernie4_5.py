"""ERNIE 4.5, dense: Llama with rope on pairs of neighbouring elements."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(
        positions=131072,
        kv_heads=2,
        head_dim=128,
        epsilon=1e-5,
        rotation=rope(5e5),
        tied=True,
        tokens=(1, 2, 0),
    ),
    flags("use_bias", ("attention.qkv_bias", "attention.o_bias", "mlp.bias"), default=False),
)

FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    rows=in_core(LLAMA_ROWS),
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{PLAIN.replace('!interleaved', 'interleaved')} !qkv_alone",
)
