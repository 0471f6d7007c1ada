"""VaultGemma: Gemma 2 without norms after its sublayers."""

from dataclasses import replace

from megaconv.families.gemma2 import FAMILY as GEMMA_2
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.row_changes import in_core, respelled

_NAMES = {"layers.{l}.mlp_norm.weight": {"hf": "model.layers.{l}.pre_feedforward_layernorm.weight"}}
ROWS = in_core(respelled((EMBEDDING, *ATTENTION, *MLP, *HEAD), _NAMES))

FAMILY = replace(
    GEMMA_2, name="vaultgemma", architectures=("VaultGemmaForCausalLM",), model_type="vaultgemma", rows=ROWS,
    fixed={**GEMMA_2.fixed, "norm.place": "before"}, recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments hardly distinguish this family from Gemma."""
