"""Names of Megatron-Bridge, key by key, as they stand in its mapping registries; and what becomes of every architecture that it has.

Source: mapping_registry() of the bridges of Megatron-Bridge at 067f987df03b, for layers of Transformer Engine with grouped experts.
Where a registry has several names for one tensor, by the layers that a model is built of, those of core 0.19 are meant. Towers
are compared in test_towers.py and test_whole_models.py.
"""

from collections.abc import Mapping

import pytest

from megaconv.families import families
from megaconv.families.parts.unsupported import UNSUPPORTED
from megaconv.families.parts.whole_model import NAMED_AS_IN_BRIDGE
from megaconv.model.naming import CORE_GROUPED, HF
from megaconv.model.patterns import expand

_HF, _CORE = "model.layers.*.", "decoder.layers.*."
Names = Mapping[str, tuple[str, ...]]
"""Megatron's name -> Hugging Face's."""

COMMON: Names = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _CORE + "self_attention.linear_qkv.weight": tuple(
        f"{_HF}self_attn.{x}_proj.weight" for x in "qkv"
    ),
    _CORE + "self_attention.linear_proj.weight": (_HF + "self_attn.o_proj.weight",),
}
NORMS_BEFORE: Names = {
    _CORE + "self_attention.linear_qkv.layer_norm_weight": (_HF + "input_layernorm.weight",)
}
QK_NORMS: Names = {
    _CORE + "self_attention.q_layernorm.weight": (_HF + "self_attn.q_norm.weight",),
    _CORE + "self_attention.k_layernorm.weight": (_HF + "self_attn.k_norm.weight",),
}
MLP: Names = {
    _CORE + "mlp.linear_fc1.weight": (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    _CORE + "mlp.linear_fc2.weight": (_HF + "mlp.down_proj.weight",),
}
NORMS_AFTER: Names = {
    _CORE + "self_attention.linear_proj.post_layernorm.weight": (
        _HF + "post_attention_layernorm.weight",
    ),
    _CORE + "mlp.linear_fc2.post_layernorm.weight": (_HF + "post_feedforward_layernorm.weight",),
}
SANDWICH: Names = {
    **NORMS_BEFORE,
    **NORMS_AFTER,
    _CORE + "mlp.linear_fc1.layer_norm_weight": (_HF + "pre_feedforward_layernorm.weight",),
}


def experts(module: str, gate: str, gate_and_up: tuple[str, str], down: str) -> Names:
    """The names of the experts of every layer, with a norm before them, in Hugging Face's words."""
    return {
        "output_layer.weight": ("lm_head.weight",),
        _CORE + "pre_mlp_layernorm.weight": (_HF + "post_attention_layernorm.weight",),
        _CORE + "mlp.router.weight": (f"{_HF}{module}.{gate}.weight",),
        _CORE + "mlp.experts.linear_fc1.weight*": tuple(
            f"{_HF}{module}.experts.*.{word}.weight" for word in gate_and_up
        ),
        _CORE + "mlp.experts.linear_fc2.weight*": (f"{_HF}{module}.experts.*.{down}.weight",),
    }


_ATTENTION, _LINEAR, _INDEXER = (
    _CORE + "self_attention.",
    _HF + "linear_attn.",
    "core_attention.indexer.",
)
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
        _SHARED + "linear_fc1.weight": tuple(
            f"{_HF}mlp.{module}.{word}_proj.weight" for word in ("gate", "up")
        ),
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
_FC1_NORM: Names = {
    _CORE + "mlp.linear_fc1.layer_norm_weight": (_HF + "post_attention_layernorm.weight",)
}
_HEAD: Names = {"output_layer.weight": ("lm_head.weight",)}
PLAIN: Names = {**COMMON, **NORMS_BEFORE, **MLP, **_FC1_NORM, **_HEAD}
_ROUTER_BIAS: Names = {
    _CORE + "mlp.router.expert_bias": (_HF + "mlp.gate.e_score_correction_bias",)
}
DEEPSEEK: Names = {
    **{
        name: words
        for name, words in SPARSE.items()
        if _INDEXER not in name and "_layernorm" not in name.split("self_attention")[-1]
    },
    _CORE + "input_layernorm.weight": (_HF + "input_layernorm.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _ATTENTION + "linear_q_proj.weight": (_HF + "self_attn.q_proj.weight",),
    _ATTENTION + "linear_q_up_proj.layer_norm_weight": (_HF + "self_attn.q_a_layernorm.weight",),
    _ATTENTION + "linear_kv_up_proj.layer_norm_weight": (_HF + "self_attn.kv_a_layernorm.weight",),
    **MLP,
    **ROUTED,
    **shared("shared_experts"),
}
_OF_Q = tuple(
    name for name in DEEPSEEK if "linear_q_" in name and not name.endswith("linear_q_proj.weight")
)
_NO_LATENT_Q = {name: words for name, words in DEEPSEEK.items() if name not in _OF_Q}
_GATED_DELTA: Names = {
    **{name: words for name, words in DELTA_NET.items() if not name.endswith("in_proj.weight")},
    _ATTENTION + "in_proj.weight": tuple(
        f"{_LINEAR}in_proj_{word}.weight" for word in ("qkv", "z", "b", "a")
    ),
}
_SHARED_GATE: Names = {_SHARED + "gate_weight": (_HF + "mlp.shared_expert_gate.weight",)}
_MIXER = "backbone.layers.*.mixer."
HYBRID: Names = {
    "embedding.word_embeddings.weight": ("backbone.embeddings.weight",),
    "decoder.final_norm.weight": ("backbone.norm_f.weight",),
    **_HEAD,
    _CORE + "mixer.in_proj.layer_norm_weight": ("backbone.layers.*.norm.weight",),
    _CORE + "mlp.linear_fc1.layer_norm_weight": ("backbone.layers.*.norm.weight",),
    _ATTENTION + "linear_qkv.layer_norm_weight": ("backbone.layers.*.norm.weight",),
    _CORE + "pre_mlp_layernorm.weight": ("backbone.layers.*.norm.weight",),
    **{
        f"{_CORE}mixer.{word}": (_MIXER + word,)
        for word in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    },
    **{
        f"{_CORE}mixer.{word}": (_MIXER + word,)
        for word in ("in_proj.weight", "conv1d.weight", "conv1d.bias")
    },
    _ATTENTION + "linear_qkv.weight": tuple(f"{_MIXER}{word}_proj.weight" for word in "qkv"),
    _ATTENTION + "linear_proj.weight": (_MIXER + "o_proj.weight",),
    _CORE + "mlp.linear_fc1.weight": (_MIXER + "up_proj.weight",),
    _CORE + "mlp.linear_fc2.weight": (_MIXER + "down_proj.weight",),
    _CORE + "mlp.router.weight": (_MIXER + "gate.weight",),
    _CORE + "mlp.router.expert_bias": (_MIXER + "gate.e_score_correction_bias",),
    **{
        f"{_CORE}mlp.{word}.weight": (f"{_MIXER}{word}.weight",)
        for word in ("fc1_latent_proj", "fc2_latent_proj")
    },
    _SHARED + "linear_fc1.weight": (_MIXER + "shared_experts.up_proj.weight",),
    _SHARED + "linear_fc2.weight": (_MIXER + "shared_experts.down_proj.weight",),
    _CORE + "mlp.experts.linear_fc1.weight*": (_MIXER + "experts.*.up_proj.weight",),
    _CORE + "mlp.experts.linear_fc2.weight*": (_MIXER + "experts.*.down_proj.weight",),
}
BRIDGE: Mapping[str, Names] = {
    **dict.fromkeys(("llama", "qwen2", "mistral"), PLAIN),
    "qwen3": {**PLAIN, **QK_NORMS},
    "qwen3_moe": {**COMMON, **NORMS_BEFORE, **QK_NORMS, **ROUTED},
    "gemma": {name: words for name, words in PLAIN.items() if name not in _HEAD},
    "nemotron": {
        **PLAIN,
        _CORE + "mlp.linear_fc1.weight": (_HF + "mlp.up_proj.weight",),
        "decoder.final_layernorm.bias": ("model.norm.bias",),
        _ATTENTION + "linear_qkv.layer_norm_bias": (_HF + "input_layernorm.bias",),
        _CORE + "mlp.linear_fc1.layer_norm_bias": (_HF + "post_attention_layernorm.bias",),
    },
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), DEEPSEEK),
    "deepseek_v2": {name: words for name, words in DEEPSEEK.items() if name not in _ROUTER_BIAS},
    "sarvam_mla": _NO_LATENT_Q,
    "glm4_moe": {**PLAIN, **QK_NORMS, **ROUTED, **shared("shared_experts"), **_ROUTER_BIAS},
    "hy_v3": {
        **PLAIN,
        **QK_NORMS,
        **experts("mlp", "router.gate", ("gate_proj", "up_proj"), "down_proj"),
        **shared("shared_mlp"),
        _CORE + "mlp.router.expert_bias": (_HF + "mlp.expert_bias",),
    },
    "exaone_moe": {
        **PLAIN,
        **QK_NORMS,
        **ROUTED,
        **shared("shared_experts"),
        _CORE + "mlp.router.expert_bias": (_HF + "mlp.e_score_correction_bias",),
    },
    "ernie4_5_moe": {
        **PLAIN,
        **ROUTED,
        **shared("shared_experts"),
        _CORE + "mlp.router.expert_bias": (_HF + "mlp.moe_statics.e_score_correction_bias",),
    },
    "nemotron_h": HYBRID,
    "qwen3_5": {**PLAIN, **QK_NORMS, **_GATED_DELTA},
    "qwen3_5_moe": {
        **COMMON,
        **NORMS_BEFORE,
        **QK_NORMS,
        **_GATED_DELTA,
        **ROUTED,
        **shared("shared_expert"),
        **_SHARED_GATE,
    },
    "qwen3_next": {
        **COMMON,
        **NORMS_BEFORE,
        **QK_NORMS,
        **DELTA_NET,
        **ROUTED,
        **shared("shared_expert"),
        **_SHARED_GATE,
    },
    "bailing_moe2": BAILING,
    "sarvam_moe": BAILING,
    "glm_moe_dsa": {**SPARSE, **MLP, **ROUTED, **shared("shared_experts")},
    "olmoe": {
        **COMMON,
        **NORMS_BEFORE,
        **QK_NORMS,
        **experts("mlp", "gate", ("gate_proj", "up_proj"), "down_proj"),
    },
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
    "gemma": _TIED,
    **{name: {*MLP, *_FC1_NORM} for name in ("qwen3_next", "qwen3_moe")},
    "sarvam_mla": set(_OF_Q),
}
"""It takes the head of the first to be tied, all layers of the others to have experts, and q of Sarvam's to be made directly."""
WITHOUT_NORMS_OF_Q = ("llama", "qwen2", "mistral", "gemma", "gemma2", "nemotron", "ernie4_5_moe")
"""Share rows with families that have them."""


def ours(name: str) -> Names:
    """The same of a family's table, without biases of q, k and v, layers for multi-token prediction, and heads of scores."""
    found: dict[str, tuple[str, ...]] = {}
    rows = (
        row
        for row in families()[name].rows
        if row.stage != "mtp" and not row.canonical.startswith("score.")
    )
    for row in (row for row in rows if not row.canonical.endswith("attn.{q|k|v}.bias")):
        core = [word for spelling in row.spelling(CORE_GROUPED) for word in expand(spelling.name)]
        hf = [word for spelling in row.spelling(HF) for word in expand(spelling.name)]
        each = [hf] if len(core) == 1 else [[word] for word in hf]
        found |= {
            starred(word): tuple(map(starred, words))
            for word, words in zip(core, each, strict=True)
        }
    return found


def starred(name: str) -> str:
    return name.replace("{l}", "*").replace("{e}", "*")


@pytest.mark.parametrize("name", BRIDGE)
def test_every_name_is_the_one_that_megatron_bridge_has(name: str) -> None:
    without, found = NOT_IN_BRIDGE.get(name, set()), ours(name)
    optional = {
        word for word in found if word.endswith(("linear_proj.bias", "fc1.bias", "fc2.bias"))
    } | ({*QK_NORMS} if name in WITHOUT_NORMS_OF_Q else set())
    assert {
        word: names for word, names in found.items() if word not in without | optional
    } == BRIDGE[name]


# Every architecture that it registers.

LANGUAGE_MODELS = [
    "BailingMoeV2",
    "DeepseekV2",
    "DeepseekV3",
    "Ernie4_5_Moe",
    "Exaone4",
    "ExaoneMoe",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm4Moe",
    "Glm4MoeLite",
    "GlmMoeDsa",
    "GptOss",
    "HYV3",
    "KimiK2",
    "Llama",
    "MiMo",
    "MiniMaxM2",
    "Mistral",
    "Nemotron",
    "NemotronH",
    "Olmoe",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "SarvamMLA",
    "SarvamMoE",
]
WHOLES = {
    "Gemma3": "gemma3", "Glm4vMoe": "glm4v_moe", "KimiK25": "kimi_k25", "Mistral3": "mistral3", "Qwen2Audio": "qwen2_audio",
    "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "Qwen3VLMoe": "qwen3_vl_moe", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe",
    "Exaone4_5_": "exaone4_5",
}  # fmt: skip
"""...ForConditionalGeneration -> model_type, of models that see or hear. Of Mistral 3 those with a `mistral` inside, not a `ministral3`."""
OTHERS = (
    *("NemotronH_Nano_VL_V2",),
    *(
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "Qwen3_5ForTokenClassification",
    ),
)


BESIDE_BY_FILES = {
    "Qwen2_5OmniForConditionalGeneration": "qwen2",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3ASRForConditionalGeneration": "qwen3",
}
"""Architectures whose tensors outside the language model have the names of their files -> the language model's family."""
BETWEEN_FILES = {
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl_moe_text",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "FalconH1ForCausalLM": "falcon_h1",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl_text",
    "Step3p5ForCausalLM": "step3p5",
    "Step3p7ForConditionalGeneration": "step3p5",
    "DeciLMForCausalLM": "nemotron_nas",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
}
"""Architectures that are converted between Hugging Face's files only -> the family of their language model."""


def test_every_architecture_that_megatron_bridge_registers_is_converted_or_refused_with_its_reason() -> (
    None
):
    ours_by_class = {word for family in families().values() for word in family.architectures}
    assert {f"{name}ForCausalLM" for name in LANGUAGE_MODELS} <= ours_by_class
    assert set(WHOLES.values()) == set(NAMED_AS_IN_BRIDGE)
    assert set(OTHERS) <= UNSUPPORTED.keys()
    read = BETWEEN_FILES | BESIDE_BY_FILES
    assert len(LANGUAGE_MODELS) + len(WHOLES) + len(OTHERS) + len(read) == 59
    assert not set(read) & UNSUPPORTED.keys()
    assert set(read.values()) <= families().keys()


def test_names_of_all_its_language_models_but_two_are_compared() -> None:
    compared = {word for name in BRIDGE for word in families()[name].architectures}
    # MiMo's have a test of their own (test_mimo.py); GPT-OSS's experts are quantized in its files.
    assert {f"{name}ForCausalLM" for name in LANGUAGE_MODELS} - compared == {
        "MiMoForCausalLM",
        "GptOssForCausalLM",
    }
