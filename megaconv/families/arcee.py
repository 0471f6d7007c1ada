"""Arcee's AFM: Llama with squared ReLU and no gate."""

from megaconv.families import Family
from megaconv.families.llama import BIASES, IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_keys import DENSE, LLAMA_LIKE, SQUARED_RELU, decoder_keys
from megaconv.families.parts.decoder_rows import in_core, without_gate
from megaconv.families.parts.keys import flags

_KEYS = (
    *decoder_keys(positions=4096, epsilon=1e-5, tokens=(128000, 128001, None)),
    BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
)

FAMILY = Family(
    "arcee", ("ArceeForCausalLM",), "arcee", in_core(without_gate(LLAMA_ROWS)), keys=_KEYS,
    fixed=LLAMA_LIKE | SQUARED_RELU, only={"hidden_act": "relu2"}, ignored=IGNORED,
    recognized=f"{DENSE} !norm_bias relu2 plain",
)  # fmt: skip
