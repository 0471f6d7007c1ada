"""The share of a GPU's peak rates that training reaches, and the time of an exchange between ranks.

PRODUCTS, TENSOR_EXPOSED and ELEMENTWISE are fitted to every second row of Megatron-LM's table of 1.7B to 462B models on
H100, and PRODUCTS_FP8 to every second row of NeMo's (`python -m benchmarks.planner fit`).
The other shares are usual results of bandwidth tests and of fused attention.
"""

from collections.abc import Callable

from megaconv.planning.gpus import Gpu

PRODUCTS = 0.64
"""Share of the peak in large products with weights."""
PRODUCTS_FP8 = 0.65
"""The same in FP8, with the casts."""
ATTENTION = 0.5
"""Share of the bf16 peak in fused attention; only the visible half of the scores is computed."""
MEMORY = 0.8
"""Share of the memory's bandwidth in elementwise work."""
LINKS = 0.8
"""Share of a link's bandwidth in collectives of large tensors."""
TENSOR_EXPOSED = 0.75
"""Share of the tensor ranks' exchanges that products don't hide. Megatron-LM hides a part (`--tp-comm-overlap`)."""
ELEMENTWISE = 4.5
"""Times that a forward pass moves each kept element through memory. A backward pass moves it twice as often."""
HALF_TILE = 64
"""Rows that a grouped product wastes for each expert: half a tile of 128 rows."""


def link(gpu: Gpu, ranks: int, stride: int) -> float:
    """Return the bytes per second with which one rank of a group sends in a ring.

    ranks: of the group. stride: distance of its ranks in the numbering of all ranks. If the group spans nodes, each of
    its ranks in a node brings its own network adapter.
    """
    here = min(ranks, max(1, gpu.node // stride))
    speed = gpu.nvlink if here == ranks else min(gpu.nvlink, gpu.network * here)
    return speed * LINKS


def exchange_seconds(
    gpu: Gpu, sent: float, ranks: int, stride: int, copies: Callable[[int], float] | None = None
) -> float:
    """Return the time of an all-to-all. sent: bytes that a rank sends to all others together.

    copies: (nodes) -> the share of the bytes to other nodes that remains if each token goes to a node only once.
    """
    if ranks == 1:
        return 0.0
    here = min(ranks, max(1, gpu.node // stride))
    near = sent * (here - 1) / (ranks - 1)
    far = (sent - near) * (copies(ranks // here) if copies and here < ranks else 1.0)
    return max(near / gpu.nvlink, far / gpu.network) / LINKS


def copies_share(nodes: int, per_token: int, most_nodes: int | None) -> float:
    """Return the copies of a token that cross to other nodes, relative to its experts there.

    most_nodes: nodes to which the router limits a token; None: no limit. Experts are chosen with equal probability.
    """
    reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** per_token)
    if most_nodes is not None:
        reached = min(reached, most_nodes * (nodes - 1) / nodes)
    return reached / (per_token * (nodes - 1) / nodes)
