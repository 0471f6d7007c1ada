"""The update of the routers' expert biases at the end of a step."""

from collections.abc import Iterator, Sequence

import torch

from megatron_lite.models.moe.balance import Balance, tokens_by_layer
from megatron_lite.models.moe.router import Router
from megatron_lite.models.network_interface import Network
from megatron_lite.parallel import comm


def move_expert_biases(
    chunks: Sequence[Network], balances: Sequence[Balance], groups: Sequence[comm.Group]
) -> None:
    """Update the expert biases from the tokens of all ranks of the stage.

    balances: of this rank's microbatches. groups: the ranks that route other tokens of the same layers.
    """
    found = tokens_by_layer(balances)
    # MTP layers that keep their values are not computed, and have no tokens.
    routers = [router for router in _routers_with_bias(chunks) if router.layer in found]
    if not routers:  # a stage may have only dense layers
        return
    tokens = torch.stack([found[router.layer] for router in routers])
    for group in groups:
        comm.all_reduce(tokens, group)
    for router, counts in zip(routers, tokens, strict=True):
        router.move_bias(counts)


def _routers_with_bias(chunks: Sequence[Network]) -> Iterator[Router]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router) and module.expert_bias is not None:
                yield module
