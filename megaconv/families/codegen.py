"""CodeGen: as GPT-J, with q, v and k of each quarter of the heads in one tensor."""

from dataclasses import replace

from megaconv.families.gptj import FAMILY as GPTJ
from megaconv.families.gptj import KEYS
from megaconv.families.parts.row_changes import respelled
from megaconv.model.table import Fused

_QKV = Fused("transformer.h.{l}.attn.qkv_proj.weight", groups="4", members=(0, 2, 1))
"""q, v and k of the first quarter of the heads, then those of the second. transformers' class has no other number."""

FAMILY = replace(
    GPTJ, name="codegen", architectures=("CodeGenForCausalLM",), model_type="codegen", keys=KEYS,
    rows=respelled(GPTJ.rows, {"layers.{l}.attn.{q|k|v}.weight": {"hf": _QKV}}), only={"n_ctx": 2048},
)  # fmt: skip
