"""QK-clip (Kimi K2, arXiv 2507.20534): limits attention scores by scaling down weights after a step.

If a head's largest score in a step is above a threshold, its query and key weights are multiplied by factors below 1.
With these weights, the score would have been the threshold.

    eta = min(1, threshold / largest score)        q eta^alpha,   k eta^(1 - alpha)

Source: clip_qk of megatron/core/optimizer/qk_clip.py and of the attention modules, core 0.16.1. As there:

- Query heads that share a key head have one eta, from the largest score of all of them.
- In latent attention, all heads share the rotated part of the keys. So the rotated part of each head's queries takes
  all of eta.

Two differences from Megatron:

- Biases are scaled with their rows. Without it, the score would not shrink by eta.
- Layers that predict further tokens are clipped too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.models.mixers.latent_attention import LatentAttention
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.passes import LargestScores
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.settings.options import QkClip

RowFactors = Mapping[tuple[int, str], Tensor]
"""The factor of each row by chunk and parameter: float32 [rows]."""


@dataclass(frozen=True)
class _Attention:
    chunk: int
    path: str
    module: SelfAttention | LatentAttention


@dataclass(frozen=True)
class StepScores:
    """The largest scores of all tokens of a step."""

    by_attention: Sequence[tuple[_Attention, Tensor]]
    """Scores of this rank's layers, [heads]."""
    top: Tensor
    """[]: the largest score of the whole model."""

    def row_factors(self, options: QkClip) -> RowFactors:
        """Return the factors of rows for Optimizer.step."""
        found = {}
        for attention, largest in self.by_attention:
            for name, rows in _rows(attention.module, largest, options):
                found[attention.chunk, f"{attention.path}.{name}"] = rows
        return found


class ScoreWatch:
    """Collects the scores of this rank's layers and heads."""

    def __init__(self, chunks: Sequence[nn.Module], grid: Grid, *, trains_mtp: bool = True) -> None:
        """chunks: those of this rank. A stage may have no layers. trains_mtp: False if MTP layers are not computed."""
        self._replicas = grid.group("replicas")
        """The ranks that have other tokens of the same layers and heads."""
        self._world, self._device = grid.group("world"), grid.device
        self._attentions: list[_Attention] = []
        for index, chunk in enumerate(chunks):
            for path, module in chunk.named_modules():
                is_computed = trains_mtp or not path.startswith("mtp.")
                if isinstance(module, SelfAttention | LatentAttention) and is_computed:
                    self._attentions.append(_Attention(index, path, module))
        self._passes: list[LargestScores] = []

    def begin(self) -> None:
        """Start a new step."""
        self._passes.clear()

    def of_pass(self) -> LargestScores:
        """Return the storage for the scores of one microbatch."""
        self._passes.append(LargestScores())
        return self._passes[-1]

    def found(self) -> StepScores:
        """Return the scores of the step. Collective over all ranks."""
        top = torch.full((), -torch.inf, device=self._device)
        own: list[Tensor] = []
        if self._attentions:  # all replicas have the same layers
            each = [self._of_passes(attention.module.layer) for attention in self._attentions]
            together = torch.cat(each)  # layers may have different numbers of heads
            comm.largest(together, self._replicas)
            top = together.amax()
            own = list(torch.split(together, [len(scores) for scores in each]))
        comm.largest(top, self._world)
        return StepScores(list(zip(self._attentions, own, strict=True)), top)

    def _of_passes(self, layer: int) -> Tensor:
        return torch.stack([scores.by_layer[layer] for scores in self._passes]).amax(0)


def _rows(
    module: SelfAttention | LatentAttention, largest: Tensor, options: QkClip
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, factors of rows) of a module's parameters."""
    if isinstance(module, SelfAttention):
        rows = rows_of_qkv(largest, module.kv_heads, module.widths, options)
        parameters = {"linear_qkv.weight": rows, "linear_qkv.bias": rows}
    else:
        rope, v_dim = module.latent.rope_dim, module.latent.v_dim
        queries = "linear_q_up_proj" if module.linear_q_proj is None else "linear_q_proj"
        parameters = {
            f"{queries}.weight": rows_of_latent_queries(largest, module.nope, rope, options),
            "linear_kv_up_proj.weight": rows_of_latent_keys(largest, module.nope, v_dim, options),
        }
    has = {name for name, _ in module.named_parameters()}
    yield from ((name, rows) for name, rows in parameters.items() if name in has)


def rows_of_qkv(
    largest: Tensor, kv_heads: int, widths: Mapping[str, int], options: QkClip
) -> Tensor:
    """Return the factors of the parts of each key head in turn.

    widths: rows of one key head by part, in their order: `q` of its heads, `k`, and others, which keep their values.
    largest [kv_heads * group] -> [kv_heads * sum of the widths].
    """
    eta = _eta(largest.view(kv_heads, -1).amax(1), options)
    factors = {"q": eta**options.alpha, "k": eta ** (1 - options.alpha)}
    unchanged = torch.ones_like(eta)
    parts = [
        factors.get(part, unchanged)[:, None].expand(-1, width) for part, width in widths.items()
    ]
    return torch.cat(parts, 1).flatten()


def rows_of_latent_queries(largest: Tensor, nope: int, rope: int, options: QkClip) -> Tensor:
    """Return the factors of [nope, rope] of each head in turn."""
    eta = _eta(largest, options)
    return torch.cat(
        ((eta**options.alpha)[:, None].expand(-1, nope), eta[:, None].expand(-1, rope)), 1
    ).flatten()


def rows_of_latent_keys(largest: Tensor, nope: int, v_dim: int, options: QkClip) -> Tensor:
    """Return the factors of [nope, v] of each head in turn."""
    eta = _eta(largest, options)
    keys = (eta ** (1 - options.alpha))[:, None].expand(-1, nope)
    return torch.cat((keys, torch.ones_like(eta)[:, None].expand(-1, v_dim)), 1).flatten()


def _eta(largest: Tensor, options: QkClip) -> Tensor:
    """Return eta. It is 1 if nothing has to change, also if no score is above 0."""
    return torch.where(largest > options.threshold, options.threshold / largest, 1.0)
