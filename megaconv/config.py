"""The configuration of a model, complete: everything that any target format has to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are those of the whole model, before any sharding or padding."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """As Hugging Face spells it, with `rope_type`; None when positions are not scaled."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    """Number of positions that a token attends to, itself included; None for all."""
    windowed_layers: tuple[int, ...] | None = None
    """Layers with the sliding window, if not all of them have it."""
    dtype: str = "bfloat16"
    """What most of the weights are stored in: read off the tensors."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    hf: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The model's own config.json, word for word, where it is known."""

    @property
    def untied(self) -> bool:
        return not self.tie_embeddings

    def sizes(self) -> dict[str, int]:
        """The sizes that shapes are written in."""
        return {name: getattr(self, name) for name in SIZES}


SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
STRUCTURE = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "tie_embeddings",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
)
"""What decides names and shapes: two descriptions of one checkpoint have to agree on these."""


def config_differences(left: ModelConfig, right: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, left value, right value) wherever two configurations mean different models."""
    return [
        (item.name, getattr(left, item.name), getattr(right, item.name))
        for item in fields(ModelConfig)
        if item.compare and getattr(left, item.name) != getattr(right, item.name)
    ]
