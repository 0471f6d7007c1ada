"""A.X K2: DeepSeek V3.2's indexers and experts, gates on norms, and a gate of attention's output.

    y = norm(x);  y * sigmoid(up(silu(down(y))))      before attention, and before the experts of a layer
    q, gate = up([norm(c); c])                        where c is the latent vector of queries

A layer without experts has a plain norm before its MLP. Megatron core has no such modules: these models are converted
between Hugging Face's files only.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.indexer import indexer_keys, sparse_attention
from megaconv.families.parts.keys import size
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.table import Fused, Row

_HF = "model.layers.{l}."
_INPUT, _MLP = _HF + "input_layernorm.", _HF + "post_attention_layernorm."
_GATE = ("norm_gate hidden", "hidden norm_gate")
_OWN = (
    Row("layers.{l}.input_norm.gate.{down|up}.weight", _GATE,
        hf=_INPUT + "{W_down|W_up}.weight",
        hf_stacked=_INPUT + "mlp.{fc1|fc2}.weight"),
    Row("layers.{l}.mlp_norm.gate.{down|up}.weight", _GATE, when="moe",
        hf=_MLP + "{W_down|W_up}.weight",
        hf_stacked=_MLP + "mlp.{fc1|fc2}.weight"),
    Row("layers.{l}.attn.{q_up|gate}.weight", ("heads*head_dim 2*q_rank", "heads*v_dim 2*q_rank"), tp=0,
        hf=Fused(_HF + "self_attn.q_b_proj.weight", groups="heads"),
        hf_stacked=Fused(_HF + "self_attn.q_gate_proj.weight", groups="heads")),
)  # fmt: skip


def _of_gated_norms(row: Row) -> Row:
    """The row, with another name for the weight of a norm with a gate."""
    if row.canonical == "layers.{l}.input_norm.weight":
        return row.renamed(hf=_INPUT + "norm.weight")
    return row.renamed(hf=_MLP + "norm.weight") if row is MOE_NORM else row


_SPARSE = (row for row in sparse_attention(halves=True) if not row.canonical.endswith(".q_up.weight"))  # fmt: skip
_LAYERS = (*map(_of_gated_norms, (*_SPARSE, *DEEPSEEK_MLPS)), *_OWN)
ROWS = hf_only((EMBEDDING, *_LAYERS, *HEAD))

_KEYS = (
    *body_keys(positions=131072, ffn=5120, tokens=(163691, 163691, None)),
    latent_heads(kv_rank=128, q_rank=384, rope=32, nope=64, v=64),
    *routed_experts(count=128, width=512),
    shared_experts(count=1, width=512),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    *indexer_keys(heads=16),
    size("gated_norm_rank", "norm.gate_rank", 16),
)
_FIXED = {**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS, "latent.gated": True}

FAMILY = Family(
    name="axk2",
    architectures=("AXK2ForCausalLM",),
    model_type="axk2",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False, "moe_layer_freq": 1},
    ignored=ROPE_FREQUENCIES,
    features=("mla", "q_latent", "indexer"),
    recognized=None,
    proven="names",
    aliases={"num_local_experts": "n_routed_experts"},
)
