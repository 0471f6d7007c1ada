"""The description of a model that no family describes: its config.json. Its tensors are added when they are known."""

from collections.abc import Mapping
from typing import Any

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
        own_names=OwnNames(raw, reason),
    )
