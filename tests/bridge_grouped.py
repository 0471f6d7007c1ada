"""Grouped layers of experts on the CPU: core's TEGroupedMLP around a stand-in for Transformer Engine's grouped linear layer.

The stand-in has the parameters, the keys and the function of the real layer. Its adapters, with their keys, their tensors'
shares of the ranks and their arithmetic, are Bridge's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch


class _Grouped(torch.nn.Module):
    """One matrix [out, in] for each local expert, at one expert-tensor-parallel rank."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **settings: Any) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, input_size, output_size
        self.config, self.groups = settings["config"], settings["pg_collection"]
        self.use_bias, self.parallel_mode = False, "column"
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.zeros(output_size, input_size))
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, splits: Any) -> tuple[torch.Tensor, None]:
        sizes = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        parts = zip(x.split(sizes), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As TEGroupedLinear._sharded_state_dict_grouped, without extra states: those of the base aren't asked for here."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        experts = self.groups.ep.size() * self.num_gemms
        first, axis = self.groups.ep.rank() * self.num_gemms, len(sharded_offsets)
        return {
            f"{prefix}weight{number}": ShardedTensor.from_rank_offsets(
                f"{prefix}weight",
                weight,
                *sharded_offsets,
                (axis, first + number, experts),
                replica_id=(0, 0, self.groups.expt_dp.rank()),
                prepend_axis_num=axis + 1,
            )
            for number, weight in enumerate(self.parameters())
        }


class Column(_Grouped):
    """The stand-in of TEColumnParallelGroupedLinear."""


class Row(_Grouped):
    """The stand-in of TERowParallelGroupedLinear."""


class _Missing:
    """The class of no layer."""


@contextmanager
def grouped_layers() -> Iterator[None]:
    """Core's local layers have grouped experts, and Bridge's adapters find them."""
    from megatron.bridge.peft import utils
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    layers = GroupedMLPSubmodules(linear_fc1=Column, linear_fc2=Row)
    experts = partial(TEGroupedMLP, submodules=layers)
    found = {"HAVE_TE": True, "TECL": (Column,), "TERL": (Row,), "TELinear": _Missing}
    with (
        patch.object(LocalSpecProvider, "grouped_mlp_modules", lambda *_: experts),
        patch.multiple(utils, **found, TELayerNormColumnParallelLinear=_Missing),
    ):
        yield
