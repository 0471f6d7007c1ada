"""ERNIE 4.5, dense: Llama whose heads rotate neighbour with neighbour."""

from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys, rope
from megaconv.families.parts.decoder_rows import in_core
from megaconv.families.parts.keys import flags

_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=2, head_dim=128, epsilon=1e-5, rotation=rope(5e5), tied=True, tokens=(1, 2, 0)
    ),
    flags("use_bias", ("attention.qkv_bias", "attention.o_bias", "mlp.bias"), default=False),
)

FAMILY = Family(
    "ernie4_5", ("Ernie4_5ForCausalLM",), "ernie4_5", in_core(LLAMA_ROWS), keys=_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True}, only=SILU, ignored=IGNORED,
    recognized=f"{PLAIN.replace('!interleaved', 'interleaved')} !qkv_alone",
)  # fmt: skip
