"""Arcee's AFM: Llama with squared ReLU and no gate."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    DENSE,
    HEADS_DIVIDE_HIDDEN,
    LLAMA_LIKE,
    SQUARED_RELU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core, without_gate

_KEYS = (
    *decoder_keys(positions=4096, epsilon=1e-5, tokens=(128000, 128001, None)),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = Family(
    name="arcee",
    architectures=("ArceeForCausalLM",),
    model_type="arcee",
    rows=in_core(without_gate(LLAMA_ROWS)),
    keys=_KEYS,
    fixed=LLAMA_LIKE | SQUARED_RELU,
    only={"hidden_act": "relu2"},
    ignored=ROPE_FREQUENCIES,
    recognized=f"{DENSE} !norm_bias relu2 plain",
)
