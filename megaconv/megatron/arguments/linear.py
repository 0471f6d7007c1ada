"""Translates between Megatron's arguments of linear attention and the configuration.

    experimental_attention_variant        `gated_delta_net`, the only kind of linear attention
    linear_attention_freq                 1 for each layer that has it, 0 for the others; a checkpoint's tensors show it
    linear_num_key_heads, linear_key_head_dim, linear_num_value_heads, linear_value_head_dim, linear_conv_kernel_dim

Source: TransformerConfig and gated_delta_net.py of megatron-core 0.16.1.
"""

from argparse import Namespace
from typing import Any

from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of

_VARIANT = "gated_delta_net"
LINEAR_SIZES = {
    "linear_num_key_heads": "linear.key_heads",
    "linear_num_value_heads": "linear.value_heads",
    "linear_key_head_dim": "linear.key_dim",
    "linear_value_head_dim": "linear.value_dim",
    "linear_conv_kernel_dim": "linear.conv",
}


def linear_arguments(config: ModelConfig) -> dict[str, Any]:
    """All arguments of linear attention; empty for models without it."""
    if not config.has("linear_layers"):
        return {}
    sizes = {name: value_of(config, field) for name, field in LINEAR_SIZES.items()}
    return sizes | {
        "experimental_attention_variant": _VARIANT,
        "linear_attention_freq": [int(kind.mixer == "linear") for kind in config.layers],
        # Core has no default for the layers with experts when it builds such a model.
        **({} if config.experts.count else {"moe_layer_freq": 1}),
        # Distributed checkpoints don't stack layers of different kinds. Core detects this by itself only for experts.
        "hetereogenous_dist_checkpoint": True,
    }


def read_linear(args: Namespace) -> dict[str, Any]:
    """The fields of linear attention; empty for other attention."""
    if getattr(args, "experimental_attention_variant", None) != _VARIANT:
        return {}
    found = {field: getattr(args, name, None) for name, field in LINEAR_SIZES.items()}
    return {field: value for field, value in found.items() if value is not None}
