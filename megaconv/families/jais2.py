"""Jais 2: LayerNorm, squared ReLU without a gate, biases on all linear layers."""

from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_rows import in_core, with_norm_biases, without_gate
from megaconv.families.parts.decoder_words import DENSE, LAYER_NORM, SQUARED_RELU, decoder_words
from megaconv.families.parts.words import flags

_WORDS = (
    *decoder_words(positions=8192, epsilon=1e-5, epsilon_key="layer_norm_eps", tokens=(0, 150024, None)),
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=True),
    flags("mlp_bias", ("mlp.bias",), default=True),
)

FAMILY = Family(
    "jais2", ("Jais2ForCausalLM",), "jais2", in_core(with_norm_biases(without_gate(LLAMA_ROWS))), words=_WORDS,
    fixed=LAYER_NORM | SQUARED_RELU, only={"hidden_act": "relu2"}, ignored=IGNORED,
    recognized=f"{DENSE} norm_bias !zero_centered relu2 plain",
)  # fmt: skip
