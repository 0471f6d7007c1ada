"""Doge: Qwen 3's attention with a mask that depends on the values, and weights of each element in residual sums.

    model.layers.{l}.self_attn.{dt_proj, A}                       the mask: how much each key/value head keeps of a token
    model.layers.{l}.{input_residual, post_attention_residual}    factors on the values that a sublayer's output is added to

A head attends to the keep_window_size tokens of which it keeps the most. Megatron core has no such mask: these models are
converted between Hugging Face's files. Models with experts (is_moe) are refused: their router mixes tokens of a batch.
Source: DogeConfig and modeling_doge.py of transformers 5.24.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Keys, flags, size
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.parts.windows import window
from megaconv.model.table import Row

_OWN, _HF = "layers.{l}.", "model.layers.{l}."
_KEPT, _PROJECTION = _OWN + "attn.kept", _HF + "self_attn.dt_proj."
_MASK = (
    Row(_KEPT + ".weight", ("kv_heads kv_heads*head_dim",), when="kept_keys", hf=_PROJECTION + "weight"),
    Row(_KEPT + ".bias", ("kv_heads",), when="kept_keys qkv_bias", hf=_PROJECTION + "bias"),
    Row(_KEPT + ".A", ("kv_heads",), when="kept_keys", hf=_HF + "self_attn.A"),
)  # fmt: skip
_RESIDUALS = (
    Row(_OWN + "attn.residual", ("hidden",), when="weighted_residuals", hf=_HF + "input_residual"),
    Row(_OWN + "mlp.residual", ("hidden",), when="weighted_residuals", hf=_HF + "post_attention_residual"),
)  # fmt: skip
ROWS = hf_only((*LLAMA_ROWS, *_MASK, *_RESIDUALS))

_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
"""Keys without effect in models without experts. The class writes them with its defaults."""

FAMILY = Family(
    name="doge",
    architectures=("DogeForCausalLM",),
    model_type="doge",
    rows=ROWS,
    keys=(
        *decoder_keys(positions=2048),
        ATTENTION_BIASES,
        flags("mlp_bias", ("mlp.bias",), default=False),
        window(None),
        size("keep_window_size", "attention.kept_keys", 2048),
        Keys(_OF_EXPERTS, lambda raw: {}, lambda config: {}),
    ),
    fixed={**LLAMA_LIKE, "attention.qk_norm": True, "weighted_residuals": True},
    only={**SILU, "is_moe": False},
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
