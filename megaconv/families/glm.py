"""GLM-4 9B (GlmForCausalLM) and GLM-Edge: rope on pairs of neighbours in half of each head; gate and up are one tensor."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.table import Fused

GATE_UP = {
    "layers.{l}.mlp.{gate|up}.weight": {"hf": Fused("model.layers.{l}.mlp.gate_up_proj.weight")}
}
ROWS = in_core(respelled(LLAMA_ROWS, GATE_UP))

GLM_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=2, head_dim=128, epsilon=1.5625e-07, partial=partial_rotation(0.5),
        tokens=(None, (151329, 151336, 151338), 151329),
    ),
    flags("attention_bias", ("attention.qkv_bias",), default=True),
)  # fmt: skip

FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    model_type="glm",
    rows=ROWS,
    keys=GLM_KEYS,
    fixed=LLAMA_LIKE | {"positions.interleaved": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{PLAIN.replace('!interleaved', 'interleaved')} qkv_alone",
)
