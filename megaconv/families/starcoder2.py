"""StarCoder 2: GPT-2's layers (LayerNorm, biases everywhere, gelu without a gate) with rope, grouped queries and
windows."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import DENSE, LAYER_NORM, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core, respelled, with_norm_biases, without_gate
from megaconv.families.parts.windows import window

_NAMES = {
    f"layers.{{l}}.mlp.{ours}.{kind}": {"hf": f"model.layers.{{l}}.mlp.{theirs}.{kind}"}
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items()
    for kind in ("weight", "bias")
}
_KEYS = (
    *decoder_keys(
        positions=4096,
        kv_heads=2,
        epsilon=1e-5,
        epsilon_key="norm_epsilon",
        tied=True,
        tokens=(50256, 50256, None),
    ),
    window(None),
    flags("use_bias", ("attention.qkv_bias", "attention.o_bias", "mlp.bias"), default=True),
)

FAMILY = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    rows=in_core(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), _NAMES)),
    keys=_KEYS,
    fixed=LAYER_NORM | {"mlp.activation": "gelu_tanh", "mlp.gated": False},
    only={"hidden_act": "gelu_pytorch_tanh"},
    ignored=ROPE_FREQUENCIES,
    recognized=f"{DENSE} norm_bias gelu_tanh plain",
)
