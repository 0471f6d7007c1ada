"""CodeGen: as GPT-J, with q, v and k of each quarter of the heads in one tensor."""

from dataclasses import replace

from megaconv.families.gptj import FAMILY as GPTJ
from megaconv.families.gptj import KEYS
from megaconv.families.parts.decoder_keys import multi_head
from megaconv.families.parts.key_changes import with_keys
from megaconv.families.parts.row_changes import respelled
from megaconv.model.table import Fused

_PARTS = 4
"""Parts of the heads. transformers' class has no other number."""
_QKV = Fused("transformer.h.{l}.attn.qkv_proj.weight", groups=str(_PARTS), members=(0, 2, 1))
"""q, v and k of the first part of the heads, then those of the second."""
_HEADS = multi_head("n_head", "n_embd", multiple=_PARTS)

FAMILY = replace(
    GPTJ, name="codegen", architectures=("CodeGenForCausalLM",), model_type="codegen",
    keys=with_keys(KEYS, (_HEADS,), "n_head"), rows=respelled(GPTJ.rows, {"layers.{l}.attn.{q|k|v}.weight": {"hf": _QKV}}),
    only={"n_ctx": 2048},
)  # fmt: skip
