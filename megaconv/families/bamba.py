"""Bamba: each layer is a Mamba 2 or attention, and a gated MLP. Half of each attention head rotates.

Megatron core's hybrid stack has layers of one part each, so a Bamba is converted between Hugging Face's files only, and
trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, MLP
from megaconv.families.parts.keys import Fields, Keys, Raw, flags, need_size
from megaconv.families.parts.mamba_and_mlp import HF, MAMBA_ONLY, MAMBA_SIZES, MIXERS, ends
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer

_NAMES = {
    "layers.{l}.mlp_norm.weight": {"hf": HF + "pre_ff_layernorm.weight"},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": HF + "feed_forward.{gate|up}_proj.weight"},
    "layers.{l}.mlp.{gate|up}.bias": {"hf": HF + "feed_forward.{gate|up}_proj.bias"},
    "layers.{l}.mlp.down.weight": {"hf": HF + "feed_forward.down_proj.weight"},
    "layers.{l}.mlp.down.bias": {"hf": HF + "feed_forward.down_proj.bias"},
}
FEED_FORWARD = respelled(MLP, _NAMES)
"""The rows of the MLP under Bamba's and Falcon-H1's names."""
ROWS = in_core((EMBEDDING, *MIXERS, *FEED_FORWARD, *ends("model.final_layernorm.weight")))

_INDICES = "attn_layer_indices"


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, "num_hidden_layers", 32)
    attends = raw.get(_INDICES) or ()
    return {"layers.mixer": per_layer(attends, layers, "attention", "mamba")}


def _write_layers(config: ModelConfig) -> Raw:
    return {_INDICES: list(config.layers_with("attention"))}


_KEYS = (
    *decoder_keys(
        positions=262144, kv_heads=8, ffn=14336, epsilon=1e-5, partial=partial_rotation(0.5), tokens=(1, 2, 0)
    ),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    Keys((_INDICES,), _read_layers, _write_layers),
    *MAMBA_SIZES,
)  # fmt: skip

FAMILY = Family(
    "bamba", ("BambaForCausalLM",), "bamba", ROWS, keys=_KEYS, fixed=LLAMA_LIKE, only=MAMBA_ONLY, recognized=None,
    aliases={"layer_types": "layers_block_type"},
    proven="names",
)  # fmt: skip
