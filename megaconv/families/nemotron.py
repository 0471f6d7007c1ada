"""Nemotron 3 and 4, Minitron: LayerNorm that multiplies by its weight + 1, squared ReLU without a gate, rope on half of
each head."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    DENSE,
    LAYER_NORM,
    SQUARED_RELU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import in_core, with_norm_biases, without_gate

_KEYS = (
    *decoder_keys(positions=4096, epsilon=1e-5, epsilon_key="norm_eps", partial=partial_rotation(0.5), tokens=(2, 3, None)),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
)  # fmt: skip

FAMILY = Family(
    name="nemotron",
    architectures=("NemotronForCausalLM",),
    model_type="nemotron",
    rows=in_core(with_norm_biases(without_gate(LLAMA_ROWS))),
    keys=_KEYS,
    fixed=LAYER_NORM | SQUARED_RELU | {"norm.zero_centered": True},
    only={"hidden_act": "relu2"},
    ignored=ROPE_FREQUENCIES,
    features=("zero_centered",),
    recognized=f"{DENSE} norm_bias zero_centered relu2 plain",
)
