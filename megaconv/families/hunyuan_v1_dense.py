"""Hunyuan 1, dense: Llama with norms of q and k after rope rotated them. Megatron core has these norms before rope.

These models are converted between Hugging Face's files, and trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, with_modules
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

MODULES = {"self_attn.{q|k}_norm": "self_attn.{query|key}_layernorm"}
FIXED = {**LLAMA_LIKE, "attention.qk_norm": True, "attention.qk_norm_rotated": True}
_ROPE = rope(10000.0)
_IN_FILES, _STRETCHED = "dynamic", "ntk_alpha"
"""The name of a scaling that stretches the base by `alpha`. transformers' own `dynamic` depends on the text's length."""


def _read_rope(raw: Raw) -> Fields:
    found = _ROPE.read(raw)
    scaling = found["positions.scaling"] or {}
    if scaling.get("rope_type") != _IN_FILES or not scaling.get("alpha"):
        return found
    return {**found, "positions.scaling": {**scaling, "rope_type": _STRETCHED}}


def _write_rope(config: ModelConfig) -> Raw:
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") != _STRETCHED:
        return _ROPE.write(config)
    return _ROPE.write(changed(config, {"positions.scaling": {**scaling, "rope_type": _IN_FILES}}))


KEYS = (
    *decoder_keys(
        positions=2048, epsilon=1e-5, tokens=(1, 2, 0), rotation=Keys(_ROPE.names, _read_rope, _write_rope)
    ),
    ATTENTION_BIASES,
)  # fmt: skip

FAMILY = replace(
    LLAMA, name="hunyuan_v1_dense", architectures=("HunYuanDenseV1ForCausalLM",), model_type="hunyuan_v1_dense",
    rows=in_core(with_modules(LLAMA.rows, MODULES)), keys=KEYS, fixed=FIXED, only={**SILU, "mlp_bias": False},
    features=("qk_norm",), recognized=None, proven="names",
)  # fmt: skip
