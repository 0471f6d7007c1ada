"""Jais 2: LayerNorm, squared ReLU without a gate, biases on all linear layers."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    DENSE,
    HEADS_DIVIDE_HIDDEN,
    LAYER_NORM,
    SQUARED_RELU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core, with_norm_biases, without_gate

_KEYS = (
    *decoder_keys(
        positions=8192, epsilon=1e-5, epsilon_key="layer_norm_eps", tokens=(0, 150024, None)
    ),
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=True),
    flags("mlp_bias", ("mlp.bias",), default=True),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = Family(
    name="jais2",
    architectures=("Jais2ForCausalLM",),
    model_type="jais2",
    rows=in_core(with_norm_biases(without_gate(LLAMA_ROWS))),
    keys=_KEYS,
    fixed=LAYER_NORM | SQUARED_RELU,
    only={"hidden_act": "relu2"},
    ignored=ROPE_FREQUENCIES,
    recognized=f"{DENSE} norm_bias !zero_centered relu2 plain",
)
