"""Names of Megatron-Bridge for models whose modules Megatron core lacks, key by key, as they stand in its mapping registries.

Source: mapping_registry() in olmoe_bridge.py, minimax_m2_bridge.py, gemma2_bridge.py, gemma3_bridge.py, exaone4_bridge.py,
qwen3_next_bridge.py, glm5_bridge.py, bailing_moe2_bridge.py and sarvam_moe_bridge.py of Megatron-Bridge at 067f987df03b, for
layers of Transformer Engine with grouped experts.
Where a registry has several names for one tensor, by the layers that a model is built of, those of core 0.19 are meant.
"""

from collections.abc import Mapping

import pytest

from megaconv.families import families
from megaconv.model.naming import CORE_GROUPED, HF
from megaconv.model.table import expand

_HF, _CORE = "model.layers.*.", "decoder.layers.*."
Names = Mapping[str, tuple[str, ...]]
"""Megatron's name -> Hugging Face's."""

COMMON: Names = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _CORE + "self_attention.linear_qkv.weight": tuple(f"{_HF}self_attn.{x}_proj.weight" for x in "qkv"),
    _CORE + "self_attention.linear_proj.weight": (_HF + "self_attn.o_proj.weight",),
}
NORMS_BEFORE: Names = {_CORE + "self_attention.linear_qkv.layer_norm_weight": (_HF + "input_layernorm.weight",)}
QK_NORMS: Names = {
    _CORE + "self_attention.q_layernorm.weight": (_HF + "self_attn.q_norm.weight",),
    _CORE + "self_attention.k_layernorm.weight": (_HF + "self_attn.k_norm.weight",),
}
MLP: Names = {
    _CORE + "mlp.linear_fc1.weight": (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    _CORE + "mlp.linear_fc2.weight": (_HF + "mlp.down_proj.weight",),
}
NORMS_AFTER: Names = {
    _CORE + "self_attention.linear_proj.post_layernorm.weight": (_HF + "post_attention_layernorm.weight",),
    _CORE + "mlp.linear_fc2.post_layernorm.weight": (_HF + "post_feedforward_layernorm.weight",),
}
SANDWICH: Names = {
    **NORMS_BEFORE,
    **NORMS_AFTER,
    _CORE + "mlp.linear_fc1.layer_norm_weight": (_HF + "pre_feedforward_layernorm.weight",),
}


def experts(module: str, gate: str, gate_and_up: tuple[str, str], down: str) -> Names:
    """Of every layer, with a norm before them; words of Hugging Face's."""
    return {
        "output_layer.weight": ("lm_head.weight",),
        _CORE + "pre_mlp_layernorm.weight": (_HF + "post_attention_layernorm.weight",),
        _CORE + "mlp.router.weight": (f"{_HF}{module}.{gate}.weight",),
        _CORE + "mlp.experts.linear_fc1.weight*": tuple(
            f"{_HF}{module}.experts.*.{word}.weight" for word in gate_and_up
        ),
        _CORE + "mlp.experts.linear_fc2.weight*": (f"{_HF}{module}.experts.*.{down}.weight",),
    }


_ATTENTION, _LINEAR, _INDEXER = _CORE + "self_attention.", _HF + "linear_attn.", "core_attention.indexer."
_HF_INDEXER, _SHARED = _HF + "self_attn.indexer.", _CORE + "mlp.shared_experts."
DELTA_NET: Names = {
    _ATTENTION + "in_proj.layer_norm_weight": (_HF + "input_layernorm.weight",),
    _ATTENTION + "in_proj.weight": (_LINEAR + "in_proj_qkvz.weight", _LINEAR + "in_proj_ba.weight"),
    _ATTENTION + "conv1d.weight": (_LINEAR + "conv1d.weight",),
    _ATTENTION + "dt_bias": (_LINEAR + "dt_bias",),
    _ATTENTION + "A_log": (_LINEAR + "A_log",),
    _ATTENTION + "out_norm.weight": (_LINEAR + "norm.weight",),
    _ATTENTION + "out_proj.weight": (_LINEAR + "out_proj.weight",),
}
SPARSE: Names = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _CORE + "input_layernorm.weight": (_HF + "input_layernorm.weight",),
    _ATTENTION + "linear_q_down_proj.weight": (_HF + "self_attn.q_a_proj.weight",),
    _ATTENTION + "q_layernorm.weight": (_HF + "self_attn.q_a_layernorm.weight",),
    _ATTENTION + "linear_q_up_proj.weight": (_HF + "self_attn.q_b_proj.weight",),
    _ATTENTION + "linear_kv_down_proj.weight": (_HF + "self_attn.kv_a_proj_with_mqa.weight",),
    _ATTENTION + "kv_layernorm.weight": (_HF + "self_attn.kv_a_layernorm.weight",),
    _ATTENTION + "linear_kv_up_proj.weight": (_HF + "self_attn.kv_b_proj.weight",),
    _ATTENTION + "linear_proj.weight": (_HF + "self_attn.o_proj.weight",),
    _ATTENTION + _INDEXER + "linear_wq_b.weight": (_HF_INDEXER + "wq_b.weight",),
    _ATTENTION + _INDEXER + "linear_wk.weight": (_HF_INDEXER + "wk.weight",),
    _ATTENTION + _INDEXER + "k_norm.weight": (_HF_INDEXER + "k_norm.weight",),
    _ATTENTION + _INDEXER + "k_norm.bias": (_HF_INDEXER + "k_norm.bias",),
    _ATTENTION + _INDEXER + "linear_weights_proj.weight": (_HF_INDEXER + "weights_proj.weight",),
    _CORE + "mlp.linear_fc1.layer_norm_weight": (_HF + "post_attention_layernorm.weight",),
    _CORE + "mlp.router.expert_bias": (_HF + "mlp.gate.e_score_correction_bias",),
}


def shared(module: str) -> Names:
    """The expert that every token passes, by Hugging Face's word for it."""
    return {
        _SHARED + "linear_fc1.weight": tuple(f"{_HF}mlp.{module}.{word}_proj.weight" for word in ("gate", "up")),
        _SHARED + "linear_fc2.weight": (f"{_HF}mlp.{module}.down_proj.weight",),
    }


ROUTED = experts("mlp", "gate", ("gate_proj", "up_proj"), "down_proj")
BAILING: Names = {
    **NORMS_BEFORE,
    **MLP,
    **ROUTED,
    **shared("shared_experts"),
    "embedding.word_embeddings.weight": ("model.word_embeddings.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _ATTENTION + "linear_qkv.weight": (_HF + "attention.query_key_value.weight",),
    _ATTENTION + "linear_proj.weight": (_HF + "attention.dense.weight",),
    _ATTENTION + "q_layernorm.weight": (_HF + "attention.query_layernorm.weight",),
    _ATTENTION + "k_layernorm.weight": (_HF + "attention.key_layernorm.weight",),
    _CORE + "mlp.linear_fc1.layer_norm_weight": (_HF + "post_attention_layernorm.weight",),
    _CORE + "mlp.router.expert_bias": (_HF + "mlp.gate.expert_bias",),
}
"""sarvam_moe_bridge.py has the same."""
BRIDGE: Mapping[str, Names] = {
    "qwen3_next": {
        **COMMON,
        **NORMS_BEFORE,
        **QK_NORMS,
        **DELTA_NET,
        **ROUTED,
        **shared("shared_expert"),
        _SHARED + "gate_weight": (_HF + "mlp.shared_expert_gate.weight",),
    },
    "bailing_moe2": BAILING,
    "sarvam_moe": BAILING,
    "glm_moe_dsa": {**SPARSE, **MLP, **ROUTED, **shared("shared_experts")},
    "olmoe": {**COMMON, **NORMS_BEFORE, **QK_NORMS, **experts("mlp", "gate", ("gate_proj", "up_proj"), "down_proj")},
    "minimax_m2": {
        **COMMON,
        **NORMS_BEFORE,
        **QK_NORMS,
        **experts("block_sparse_moe", "gate", ("w1", "w3"), "w2"),
        _CORE + "mlp.router.expert_bias": (_HF + "block_sparse_moe.e_score_correction_bias",),
    },
    "gemma2": {**COMMON, **SANDWICH, **MLP},
    "gemma3_text": {**COMMON, **SANDWICH, **MLP, **QK_NORMS},
    "exaone4": {**COMMON, **NORMS_AFTER, **MLP, **QK_NORMS},
}
_TIED = {"output_layer.weight"}
NOT_IN_BRIDGE: Mapping[str, set[str]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "exaone4"), _TIED),
    "qwen3_next": {*MLP, _CORE + "mlp.linear_fc1.layer_norm_weight"},
}
"""It takes the head of the first to be tied, and all layers of a Qwen3-Next to have experts."""


def ours(name: str) -> Names:
    """The same of a family's table, without biases of q, k and v, and layers for multi-token prediction."""
    found: dict[str, tuple[str, ...]] = {}
    rows = (row for row in families()[name].rows if row.stage != "mtp")
    for row in (row for row in rows if not row.canonical.endswith("attn.{q|k|v}.bias")):
        core = [word for spelling in row.spelling(CORE_GROUPED) for word in expand(spelling.name)]
        hf = [word for spelling in row.spelling(HF) for word in expand(spelling.name)]
        each = [hf] if len(core) == 1 else [[word] for word in hf]
        found |= {starred(word): tuple(map(starred, words)) for word, words in zip(core, each, strict=True)}
    return found


def starred(name: str) -> str:
    return name.replace("{l}", "*").replace("{e}", "*")


@pytest.mark.parametrize("name", BRIDGE)
def test_every_name_is_the_one_that_megatron_bridge_has(name: str) -> None:
    without, found = NOT_IN_BRIDGE.get(name, set()), ours(name)
    optional = {word for word in found if word.endswith(("linear_proj.bias", "fc1.bias", "fc2.bias"))} | (
        {*QK_NORMS} if name == "gemma2" else set()
    )
    assert {word: names for word, names in found.items() if word not in without | optional} == BRIDGE[name]
