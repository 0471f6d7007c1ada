"""MiniMax-Text-01 and M1: Mixtral's experts, lightning attention in most layers, and residuals that follow the norms.

    hf    model.layers.{l}.self_attn.{qkv_proj, output_gate, norm, out_proj} of lightning attention, and Mixtral's names

These are the files of transformers' class (MiniMax-Text-01-hf). Lightning attention (arXiv 2501.08313) forgets at a rate
that follows from the numbers of the layer and of the head. Files may hold these rates; they are left out, since the class
computes them. Megatron core has no such layers: these models are converted between Hugging Face's files. Source:
MiniMaxConfig and modeling_minimax.py of transformers 5.23.
"""

from collections.abc import Sequence

from megaconv.families import Family
from megaconv.families.mixtral import FAMILY as MIXTRAL
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.experts import EXPERTS_WIDTH
from megaconv.families.parts.keys import Raw, number, size
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import hf_only, without_biases, without_rows
from megaconv.families.parts.windows import window
from megaconv.model.table import Fused, Row

_ATTENTION = "model.layers.{l}.self_attn."
_WIDTH = "heads*head_dim"
_LIGHTNING = (
    Row("layers.{l}.lightning.{q|k|v}.weight", (f"{_WIDTH} hidden",) * 3, tp=0, when="lightning",
        hf=Fused(_ATTENTION + "qkv_proj.weight", groups="heads")),
    Row("layers.{l}.lightning.gate.weight", (f"{_WIDTH} hidden",), tp=0, when="lightning",
        hf=_ATTENTION + "output_gate.weight"),
    Row("layers.{l}.lightning.out_norm.weight", (_WIDTH,), tp=0, when="lightning",
        hf=_ATTENTION + "norm.weight"),
    Row("layers.{l}.lightning.o.weight", (f"hidden {_WIDTH}",), tp=1, when="lightning",
        hf=_ATTENTION + "out_proj.weight"),
)  # fmt: skip
_NORM, *_OTHERS = without_rows(without_biases(ATTENTION), "layers.{l}.attn.{q|k}_norm.weight")
_EXPERTS = tuple(row for row in MIXTRAL.rows if ".mlp" in row.canonical)
ROWS = hf_only(
    (EMBEDDING, _NORM, *rows_of("attention", tuple(_OTHERS)), *_LIGHTNING, *_EXPERTS, *HEAD)
)
_RATES = (r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",)

_WORDS = {"full_attention": "attention", "linear_attention": "lightning"}


def _by_turns(raw: Raw, layers: int) -> Sequence[str]:
    full, linear = _WORDS
    return [linear if layer % 2 else full for layer in range(layers)]


_FACTORS = {
    "full_attn_alpha_factor": "factors.attention_residual",
    "full_attn_beta_factor": "factors.attention_out",
    "linear_attn_alpha_factor": "factors.lightning_residual",
    "linear_attn_beta_factor": "factors.lightning_out",
    "mlp_alpha_factor": "factors.mlp_residual",
    "mlp_beta_factor": "factors.mlp_down",
}
_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, ffn=14336, epsilon=1e-5, rotation=rope(1e6), tokens=(1, 2, None)
    ),
    window(None),
    layer_mixers(_WORDS, _by_turns),
    size("num_local_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
    EXPERTS_WIDTH,
    *(number(key, field, 1.0) for key, field in _FACTORS.items()),
)  # fmt: skip

FAMILY = Family(
    name="minimax",
    architectures=("MiniMaxForCausalLM",),
    model_type="minimax",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, "layers.mlp": "experts", "norm.place": "residual"},
    only=SILU,
    aliases=MIXTRAL.aliases,
    ignored=(*ROPE_FREQUENCIES, *_RATES),
    recognized=None,
    proven="names",
    numbered="the decay of lightning attention",
)
