"""Mixtral: Mistral's attention, with experts in every layer."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.experts import EXPERTS_WIDTH, MOE_NORM, expert_rows
from megaconv.families.parts.keys import size
from megaconv.families.parts.rope import rope
from megaconv.families.parts.windows import window

_EXPERT = "block_sparse_moe.experts.{e}."
_EXPERTS = expert_rows(
    "block_sparse_moe.gate.weight", _EXPERT + "{w1|w3}.weight", _EXPERT + "w2.weight"
)
_MISTRALS_OWN = {
    "layers.{l}.mlp_norm.weight": "layers.{l}.ffn_norm.weight",
    "layers.{l}.mlp.router.weight": "layers.{l}.feed_forward.gate.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": "layers.{l}.feed_forward.experts.{e}.{w1|w3}.weight",
    "layers.{l}.mlp.experts.{e}.down.weight": "layers.{l}.feed_forward.experts.{e}.w2.weight",
}
"""Names in consolidated.safetensors: those of mistral-inference's modules."""
_OWN = tuple(row.renamed(meta=_MISTRALS_OWN[row.canonical]) for row in (MOE_NORM, *_EXPERTS))
ROWS = (EMBEDDING, *ATTENTION, *_OWN, *HEAD)

_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, epsilon=1e-5, rotation=rope(1e6), tokens=(1, 2, None)
    ),
    window(None),
    size("num_local_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
    EXPERTS_WIDTH,
)

FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"layers.mlp": "experts"},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{MIXTURE} !sigmoid_router !shared_ffn !qk_norm",
    aliases={"num_experts": "num_local_experts"},
)
