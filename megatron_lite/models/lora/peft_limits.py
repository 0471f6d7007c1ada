"""Adapters that peft can't load or computes otherwise, though they are trained, computed and merged here."""

from collections.abc import Iterable

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megatron_lite.models.lora.whole import HEAD
from megatron_lite.settings.options import LoRA

MIXED_UP = frozenset((
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "qwen3_omni_moe", "sarvam_mla", "solar_open",
))  # fmt: skip
"""model_type of models with stacked experts that transformers 5 converts from files with one tensor for each expert. peft takes
adapters of their dense layers and shared experts for adapters of the experts, which have the same names in older releases.
Source: peft 0.21.2, utils/transformers_weight_conversion.py; transformers 5.24, conversion_mapping.py."""
_NAMES = ("gate_proj", "up_proj", "down_proj")


def notice_of_rows(config: ModelConfig, options: LoRA) -> str | None:
    """Return a line if peft 0.21 computes trained rows of the head otherwise; None if it doesn't.

    Source: peft 0.21.2, tuners/trainable_tokens/layer.py.
    """
    if not config.head.bias or not options.tokens_of(HEAD):
        return None
    return "peft 0.21 leaves out the bias of the head when it computes trained rows of it; a merged model has the bias, and so has this run"


def notice_of_peft(config: ModelConfig, modules: Iterable[str]) -> str | None:
    """Return a line if peft 0.21 can't load an adapter of this model; None if it can. modules: paths of adapted modules."""
    if family(config.family).model_type not in MIXED_UP:
        return None
    mixed_up = any(module.endswith(_NAMES) and ".experts." not in module for module in modules)
    if not mixed_up:
        return None
    return (
        "peft 0.21 can't load this adapter: in models of this type, it takes adapters of gate_proj, up_proj and down_proj for those "
        "of experts; megaconv merge merges it, and --adapter computes it"
    )
