"""Measures of the change that layers make to their input. Layers of the least change can be left out of a model.

a layer    1 - the cosine between its input and its output, as a mean over tokens (ShortGPT, arXiv:2403.03853)
a block    the angle between the input of its first layer and the output of its last one, as a share of a half turn
           and as a mean over tokens (arXiv:2403.17887)
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from formats.errors import CorruptCheckpoint
from megatron_lite.engine import Engine
from megatron_lite.forward.rows import counted_tokens
from megatron_lite.forward.walk import walk
from megatron_lite.models.batch import Microbatch


@dataclass(frozen=True)
class Influence:
    """Means over all tokens."""

    layers: Sequence[float]
    """1 - the cosine, of each layer."""
    blocks: Sequence[float]
    """The angle, of each block of consecutive layers, by its first layer."""
    tokens: int

    @property
    def by_block(self) -> list[int]:
        """The first layers of blocks, that of the least change first."""
        return sorted(range(len(self.blocks)), key=self.blocks.__getitem__)

    def least_layers(self, count: int) -> list[int]:
        """Return the layers that change least, in their order."""
        by_change = sorted(range(len(self.layers)), key=self.layers.__getitem__)
        return sorted(by_change[:count])


def measure(engine: Engine, passes: Sequence[Microbatch], block: int) -> Influence:
    """Compute all layers of a decoder in one process. block: number of layers of a block.

    Raises CorruptCheckpoint for values that are not finite.
    """
    count = engine.config.layer_count
    layers = torch.zeros(count, dtype=torch.float64)
    blocks = torch.zeros(count + 1 - block, dtype=torch.float64)
    tokens = 0
    with torch.inference_mode():
        for batch in passes:
            counts = counted_tokens(batch)
            tokens += int(counts.sum())
            states = walk(engine.chunks[0], engine.make_pass(batch))
            inputs = deque([next(states).hidden], maxlen=block)  # of the last layers
            for layer, state in zip(range(count), states, strict=False):
                cosines = _cosines(inputs[-1], state.hidden, counts)
                layers[layer] += float((1 - cosines).sum())
                if not math.isfinite(layers[layer]):
                    raise CorruptCheckpoint(
                        f"layer {layer} computes NaN or infinite values, so layers can't be ranked; `megaconv inspect --stats` "
                        "shows the tensors that have some"
                    )
                if len(inputs) == block:
                    cosines = _cosines(inputs[0], state.hidden, counts)
                    blocks[layer + 1 - block] += float(torch.arccos(cosines).sum()) / math.pi
                inputs.append(state.hidden)
    return Influence((layers / tokens).tolist(), (blocks / tokens).tolist(), tokens)


def _cosines(before: Tensor, after: Tensor, counts: Tensor) -> Tensor:
    """Return float64 [tokens that count], on the CPU. before, after: [tokens, batch, hidden]."""
    counts = counts.to(before.device)
    cosines = F.cosine_similarity(before[counts].float(), after[counts].float(), dim=-1)
    return cosines.double().clamp(-1, 1).cpu()
