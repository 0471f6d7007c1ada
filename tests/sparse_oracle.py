"""Sparse attention on the CPU: megatron-core's own DSAttention and indexer in the layers of its local specification.

What core 0.16.1 builds an indexer of are Transformer Engine's linear layers, of which each rank has the whole: here torch's. The
Hadamard rotation of q and k, which leaves their products as they are, needs a package and bfloat16, and is left out as
transformers does.
"""

from argparse import Namespace
from typing import Any


def put_into(spec: Any, args: Namespace) -> None:
    """Give the layers of a block their indexer."""
    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if getattr(args, "experimental_attention_variant", None) != "dsa":
        return

    class Linear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x: Any) -> Any:
            return super().forward(x), None

    dsa.rotate_activation = lambda x: x
    parts = dsa.DSAIndexerSubmodules(Linear, Linear, WrappedTorchNorm, Linear)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
            module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer)
        )
