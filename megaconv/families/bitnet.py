"""BitNet b1.58 in bfloat16: Llama with squared ReLU, and a norm before the last matrix of attention and of the MLP.

Megatron core has no such norms: these models are converted between Hugging Face's files, and trained. Weights that are
packed in two bits are refused, and the trainer computes weights as they are, without rounding to three values.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, body_keys, heads
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core
from megaconv.model.table import Row

_HF, _CORE = "model.layers.{l}.", "decoder.layers.{l}."
_INNER = (
    Row("layers.{l}.attn.inner_norm.weight", ("heads*head_dim",), tp=0,
        hf=_HF + "self_attn.attn_sub_norm.weight",
        core=_CORE + "self_attention.inner_norm.weight"),
    Row("layers.{l}.mlp.inner_norm.weight", ("ffn",), tp=0,
        hf=_HF + "mlp.ffn_sub_norm.weight",
        core=_CORE + "mlp.inner_norm.weight"),
)  # fmt: skip
_KEYS = (
    *body_keys(positions=2048, ffn=6912, epsilon=1e-5, rotation=rope(500000.0), tokens=(128000, 128001, None)),
    heads(5, own_size=False),
    ATTENTION_BIASES,
)  # fmt: skip

FAMILY = replace(
    LLAMA, name="bitnet", architectures=("BitNetForCausalLM",), model_type="bitnet", rows=in_core((*LLAMA.rows, *_INNER)), keys=_KEYS,
    fixed={**LLAMA.fixed, "mlp.activation": "relu2", "norm.inner": True}, only={"hidden_act": "relu2"}, recognized=None,
    proven="names",
)  # fmt: skip
