"""Granite 4: each layer is a Mamba 2 or attention, and experts with a shared expert, or an MLP; with Granite's factors.

Megatron core has no such layers and no such factors, so these models are converted between Hugging Face's files only, and
trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    heads,
    model_keys,
)
from megaconv.families.parts.decoder_rows import EMBEDDING, MLP
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.granite import EXPERTS, FACTORS, SHARED_NAMES
from megaconv.families.parts.keys import (
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    size,
)
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import MAMBA_ONLY, MAMBA_SIZES, MIXERS, ends
from megaconv.families.parts.rope import FULL_ROTATION, rope
from megaconv.families.parts.row_changes import in_all_forms, in_core
from megaconv.model.config import ModelConfig

_DENSE = in_all_forms(tuple(row for row in MLP if not row.canonical.endswith("bias")), SHARED_NAMES)
ROWS = in_core((EMBEDDING, *MIXERS, MOE_NORM, *_DENSE, *EXPERTS, *ends("model.norm.weight")))

_WORDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}  # fmt: skip
"""Word for a layer -> mixer. Files on the Hub have the first of two words, transformers 5.23 the second."""


def _read_widths(raw: Raw) -> Fields:
    """The widths of the MLP: that of the shared MLP alone, or also that of the experts."""
    count = raw.get("num_local_experts", 8)
    shared = need_size(raw, "shared_intermediate_size", 1024)
    if not count:
        return {"mlp.ffn": shared}
    width = need_size(raw, "intermediate_size", 11008)
    experts = {"experts.count": need_size(raw, "num_local_experts", 8), "experts.ffn": width}
    per_token = need_size(raw, "num_experts_per_tok", 2)
    layers = {"layers.mlp": "experts", "mlp.ffn": width}
    return {**layers, **experts, "experts.per_token": per_token, "experts.shared_ffn": shared}


def _write_widths(config: ModelConfig) -> Raw:
    experts = config.experts
    if not experts.count:
        ffn = config.mlp.ffn
        return {"num_local_experts": 0, "shared_intermediate_size": ffn, "intermediate_size": ffn}
    return {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "intermediate_size": experts.ffn,
        "shared_intermediate_size": experts.shared_ffn,
    }


_WIDTHS = ("num_local_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size")  # fmt: skip
_KEYS = (
    size("hidden_size", "hidden", 4096),
    size("num_hidden_layers", "layers.count", 32),
    size("max_position_embeddings", "max_positions", 2048),
    number("rms_norm_eps", "norm.epsilon", 1e-6),
    heads(None),
    rope(10000.0),
    FULL_ROTATION,
    choice("position_embedding_type", "positions.kind", {"nope": "none", None: "none", "rope": "rope"}, None),
    layer_mixers(_WORDS, lambda raw, layers: ["mamba"] * layers, layers=32),
    Keys(_WIDTHS, _read_widths, _write_widths),
    *MAMBA_SIZES,
    ATTENTION_BIASES,
    *FACTORS,
    *model_keys(tied=False, tokens=(1, 2, None)),
)  # fmt: skip
_FIXED = {name: value for name, value in LLAMA_LIKE.items() if name != "positions.kind"}

FAMILY = Family(
    name="granite_moe_hybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=MAMBA_ONLY,
    recognized=None,
    aliases={"layers_block_type": "layer_types"},
    proven="names",
)
