"""Gated delta nets on the CPU: layers of megatron-core's own GatedDeltaNet among those of its local layer specification.

What core 0.16.1 builds such models of needs Transformer Engine and flash-linear-attention: here the same module gets core's
own linear layers and torch's norm, the scan that core itself has for deterministic runs, and the one function that it takes
from that package, which divides by the length of a vector.
"""

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig


def layers(args: Namespace) -> list[int]:
    """1 for each layer that is one; empty for other models."""
    return list(getattr(args, "linear_attention_freq", None) or [])


def settings(args: Namespace) -> dict[str, Any]:
    """Fields of the configuration with another value than the arguments'."""
    is_hybrid = "G" in (getattr(args, "hybrid_layer_pattern", None) or "")
    return {"deterministic_mode": True} if layers(args) or is_hybrid else {}


def put_into(
    spec: Any, args: Namespace, config: "TransformerConfig", virtual_stage: int | None
) -> None:
    """Give the linear layers of a block their mixer. Distributed checkpoints call a norm before it as Transformer Engine does."""
    from copy import deepcopy

    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if not layers(args):
        return
    first, count = (
        get_transformer_layer_offset(config, virtual_stage),
        get_num_layers_to_build(config, virtual_stage),
    )
    for index, is_linear in enumerate(layers(args)[first : first + count]):
        if is_linear:
            layer = spec.layer_specs[index] = deepcopy(spec.layer_specs[index])
            layer.submodules.self_attention = mixer()
            keys = layer.submodules.sharded_state_dict_keys_map
            layer.submodules.sharded_state_dict_keys_map = {
                **keys,
                "input_layernorm.": "self_attention.in_proj.layer_norm_",
            }


def mixer() -> Any:
    """The specification of core's own module, of its local layers."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    replace_length()
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)


def replace_length() -> None:
    """Give the mixer the function of flash-linear-attention. Core 0.19 has the mixer's base class in a module of its own."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    module = vars(sys.modules[GatedDeltaNet.__init__.__module__])
    module["HAVE_FLA"], module["l2norm"] = True, to_unit_length


def to_unit_length(vectors: "torch.Tensor") -> "torch.Tensor":
    import torch

    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
