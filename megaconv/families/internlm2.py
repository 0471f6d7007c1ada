"""InternLM 2: Llama with other names, and q, k and v in one tensor, bundled by key/value head.

No release of transformers contains this architecture. Names and defaults come from the repository internlm/internlm2-7b
(modeling_internlm2.py and configuration_internlm2.py).
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.table import Fused, Spelling

_LAYER = "model.layers.{l}."
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {"hf": "model.tok_embeddings.weight"},
    "layers.{l}.input_norm.weight": {"hf": _LAYER + "attention_norm.weight"},
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused(_LAYER + "attention.wqkv.weight", groups="kv_heads")},
    "layers.{l}.attn.{q|k|v}.bias": {"hf": Fused(_LAYER + "attention.wqkv.bias", groups="kv_heads")},
    "layers.{l}.attn.o.weight": {"hf": _LAYER + "attention.wo.weight"},
    "layers.{l}.attn.o.bias": {"hf": _LAYER + "attention.wo.bias"},
    "layers.{l}.mlp_norm.weight": {"hf": _LAYER + "ffn_norm.weight"},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": _LAYER + "feed_forward.{w1|w3}.weight"},
    "layers.{l}.mlp.down.weight": {"hf": _LAYER + "feed_forward.w2.weight"},
    "head.weight": {"hf": "output.weight"},
}  # fmt: skip
_KEYS = (
    *decoder_keys(positions=2048, tokens=(1, 2, 0)),
    flags("bias", ("attention.qkv_bias", "attention.o_bias"), default=True),
)

FAMILY = replace(
    LLAMA, name="internlm2", architectures=("InternLM2ForCausalLM",), model_type="internlm2",
    rows=in_core(respelled(LLAMA_ROWS, _NAMES)), keys=_KEYS, only=SILU, recognized=None, proven="names",
)  # fmt: skip
