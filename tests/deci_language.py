"""DeciLM, which no release of transformers has: transformers' Llama, whose layers get sizes of their own, or lack a part.

Source: modeling_decilm.py of nvidia/Llama-3_3-Nemotron-Super-49B-v1. A layer without attention or without an MLP has no norm
before that part either.
"""

from copy import copy
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

MULTIPLE = 256
"""Widths of MLPs are rounded up to a multiple of this number."""


@strict
class DeciConfig(LlamaConfig):
    model_type = "nemotron-nas"
    intermediate_size: int | None = None
    block_configs: list[Any] | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        self.num_key_value_heads = None


def of_layer(config: DeciConfig, block: dict[str, Any]) -> LlamaConfig:
    """The configuration of a Llama with the sizes of one layer. A part that the layer lacks has any size."""
    own = copy(config)
    heads = config.num_attention_heads
    own.num_key_value_heads = heads // (block["attention"]["n_heads_in_group"] or 1)
    width = int(2 * (block["ffn"]["ffn_mult"] or 1) * config.hidden_size / 3)
    own.intermediate_size = -(-width // MULTIPLE) * MULTIPLE
    return own


class DeciLayer(LlamaDecoderLayer):
    def __init__(self, config: DeciConfig, layer: int) -> None:
        assert config.block_configs is not None
        block = config.block_configs[layer]
        super().__init__(of_layer(config, block), layer)
        if block["attention"]["no_op"]:
            self.input_layernorm, self.self_attn = None, None
        if block["ffn"]["no_op"]:
            self.post_attention_layernorm, self.mlp = None, None

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        if self.self_attn is not None:
            normed = self.input_layernorm(hidden_states)
            hidden_states = hidden_states + self.self_attn(hidden_states=normed, **options)[0]
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class DeciModel(LlamaModel):
    config_class = DeciConfig

    def __init__(self, config: DeciConfig) -> None:
        assert config.block_configs is not None
        super().__init__(of_layer(config, config.block_configs[0]))
        self.config = config
        layers = (DeciLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.post_init()


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciConfig

    def __init__(self, config: DeciConfig) -> None:
        assert config.block_configs is not None
        super().__init__(of_layer(config, config.block_configs[0]))
        self.config = config
        self.model = DeciModel(config)
        self.post_init()

    @classmethod
    def from_config(cls, config: DeciConfig, **options: Any) -> "DeciLMForCausalLM":
        made: DeciLMForCausalLM = cls._from_config(config, **options)
        return made
