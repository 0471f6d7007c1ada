"""The description of a model that no family describes: its config.json. Its tensors are added when they are known."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import UnsupportedInput
from megaconv.families.parts.hf_config import MLX, as_file, quant_method
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import whole_config_json
from megaconv.model.config import ModelConfig
from megaconv.model.own_names import OwnNames
from megaconv.model.subjects import MLP, Attention, LayerKind

OWN_NAMES = "own names"
"""The name that takes the place of a family's."""


def without_family(raw: Mapping[str, Any], reason: str) -> ModelConfig:
    """The model of a config.json. reason: why no family describes it, for messages."""
    return ModelConfig(
        family=OWN_NAMES,
        layers=(LayerKind(),),
        hidden=1,
        vocab=1,
        max_positions=1,
        attention=Attention(heads=1, kv_heads=1, head_dim=1),
        mlp=MLP(ffn=1),
        own_names=OwnNames(raw, reason, stays_quantized=not _is_read(raw)),
    )


def _is_read(raw: Mapping[str, Any]) -> bool:
    """True if the weights are plain, or quantized by a method that megaconv reads."""
    try:
        return quant_method(raw, CONFIG_NAME) != MLX
    except UnsupportedInput:
        return False


def config_of_own_names(model: OwnNames, dtype: str) -> bytes:
    """The config.json of such a model. dtype: the dtype of most of its tensors."""
    if model.stays_quantized:
        return as_file(model.config)
    return whole_config_json(model.config, dtype)
