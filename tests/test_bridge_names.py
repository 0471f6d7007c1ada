"""Names of Megatron-Bridge for models whose modules Megatron core lacks, key by key, as they stand in its mapping registries.

Source: mapping_registry() in olmoe_bridge.py, minimax_m2_bridge.py, gemma2_bridge.py, gemma3_bridge.py and exaone4_bridge.py
of Megatron-Bridge at 067f987df03b, for layers of Transformer Engine with grouped experts.
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


BRIDGE: Mapping[str, Names] = {
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
NOT_IN_BRIDGE = {"gemma2", "gemma3_text", "exaone4"}, {"output_layer.weight"}
"""(families, names): it takes the head of these to be tied."""


def ours(name: str) -> Names:
    """The same of a family's table, without biases and without what only models without QK norms lack."""
    found: dict[str, tuple[str, ...]] = {}
    for row in (row for row in families()[name].rows if not row.canonical.endswith("attn.{q|k|v}.bias")):
        core = [word for spelling in row.spelling(CORE_GROUPED) for word in expand(spelling.name)]
        hf = [word for spelling in row.spelling(HF) for word in expand(spelling.name)]
        each = [hf] if len(core) == 1 else [[word] for word in hf]
        found |= {starred(word): tuple(map(starred, words)) for word, words in zip(core, each, strict=True)}
    return found


def starred(name: str) -> str:
    return name.replace("{l}", "*").replace("{e}", "*")


@pytest.mark.parametrize("name", BRIDGE)
def test_every_name_is_the_one_that_megatron_bridge_has(name: str) -> None:
    without, found = NOT_IN_BRIDGE[1] if name in NOT_IN_BRIDGE[0] else set(), ours(name)
    optional = {word for word in found if word.endswith(".bias")} | ({*QK_NORMS} if name == "gemma2" else set())
    assert {word: names for word, names in found.items() if word not in without | optional} == BRIDGE[name]
