"""Models without a head: transformers' classes XModel, as sentence-transformers stores embedding models.

    MistralModel    the tensors of MistralForCausalLM without lm_head, by names without the prefix `model.`

Such a model is described as one whose head is tied to the embedding: both have the same tensors. config.json keeps its class and
its keys, and files of Hugging Face keep their names. Source: AutoModel of transformers 5.24.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.families.parts.keys import Fields
from megaconv.model.config import ModelConfig

_LISTED = """
    afmoe apertus arcee aria_text axk1 axk2 bamba beam biogpt bitnet bloom cohere cohere2 cohere2_moe cohere_compass_text cwm
    deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo
    flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss granite granite_moe granite_moe_hybrid granite_moe_shared granite_moe_swa
    granite_swa helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe kolibri1 laguna lara_mini lfm2
    lfm2_moe lfm3 llama llama4 longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3
    mistral mistral4 mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmoe openai_gpt opt persimmon phi3 qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma xglm youtu zamba zamba2
"""
FAMILIES = frozenset(_LISTED.split())
"""The families whose models without a head have the tensors of those with one, and no others. In other families the head has
further tensors, such as a bias, or transformers' class has other names."""
_HEADS = ("ForCausalLM", "LMHeadModel")
"""Ends of classes with a head for words."""
_BARE = ("Model", "TextModel")
"""Ends of the classes of the same models without one."""


def bare_classes(family: str, architectures: Sequence[str]) -> tuple[str, ...]:
    """The classes without a head of a family. architectures: those with one; the first is the usual one."""
    if family not in FAMILIES:
        return ()
    name = architectures[0]
    stem = next(name.removesuffix(end) for end in _HEADS if name.endswith(end))
    return tuple(stem + end for end in _BARE)


def read_bare(family: str, architectures: Sequence[str], raw: Mapping[str, Any]) -> Fields:
    """The fields of a model without a head; empty for one with a head. raw: its config.json."""
    named = raw.get("architectures") or ()
    has_none = any(name in named for name in bare_classes(family, architectures))
    return {"tie_embeddings": True} if has_none else {}


def is_bare(architectures: Sequence[str], config: ModelConfig) -> bool:
    """True if the model's own config.json names a class without a head. architectures: see bare_classes."""
    return bool(read_bare(config.family, architectures, config.hf or {}))
