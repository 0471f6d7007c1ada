"""A pass: everything that the parts of a model are to know of one microbatch on its way through them, made once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models import rng
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.cache import Cache
from megatron_lite.models.moe.balance import Balance
from megatron_lite.models.rotary import Rotary, local_positions
from megatron_lite.parallel.context import ContextGroup


class Packed:
    """Where in the rows of a batch documents end that don't see each other.

    A class of its own so that torch.compile, which would compile anew for other numbers, never looks into it.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device) -> None:
        """lengths: for each row those of its documents, which add up to the row."""
        self.lengths = tuple(map(tuple, lengths))
        each = list(chain.from_iterable(lengths))
        ends = torch.tensor([0, *accumulate(each)], dtype=torch.int32, pin_memory=device.type == "cuda")
        self.cu_seqlens = ends.to(device, non_blocking=True)
        """int32 [documents + 1], row after row: where each begins, and where the last one ends."""
        self.longest = max(each)


@dataclass(frozen=True)
class Ahead:
    """What a layer that predicts further tokens is to know: all [batch, sequence], this rank's part, moved places to the left."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    """float32; 0 where a document has no token so far ahead."""
    counting: Tensor
    """float32 []: the sum of the whole microbatch's weights."""


class LargestScores:
    """What attention of one pass of a microbatch has met. A class of its own so that torch.compile never looks into it."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}
        """float32 [heads]: of this rank's heads (and at first -inf for those that another context rank computes)."""


@dataclass(frozen=True)
class Pass:
    """Of one microbatch. Chunks of a rank that the microbatch passes one after another are handed the same one."""

    tokens: Tensor
    """int64 [batch, sequence]: this rank's part of the microbatch, as all that follows."""
    labels: Tensor
    """int64 [batch, sequence]"""
    weights: Tensor | None
    """float32 [batch, sequence]: how much each label counts; None: all 1."""
    positions: Tensor
    """int64 [sequence, batch or 1]"""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of these positions, [sequence, batch or 1, 1, rotated], as rotary.py says; None where nothing rotates."""
    local_rotary: tuple[Tensor, Tensor] | None = None
    """The same for layers with a window, where these have another base; None where they don't."""
    packed: Packed | None = None
    """Of whole rows; None: each is one document."""
    context: ContextGroup | None = None
    """The ranks that have the other parts of each row; None: this one has all of it."""
    share: float = 0.0
    """What the loss of each label (or pair) is multiplied with to go backward from."""
    reference: Tensor | None = None
    """As Microbatch has it."""
    seed: rng.Seed | None = None
    """Of dropout; None: nothing is dropped."""
    balance: Balance | None = None
    """Of experts; None where nothing goes backward."""
    cache: Cache | None = None
    """Keys and values of the tokens before these; None: there are none."""
    source: "Pass | None" = None
    """The encoder's, of what the decoder attends to; None where there is no encoder."""
    types: Tensor | None = None
    visible: Tensor | None = None
    swapped: Tensor | None = None
    answers: Tensor | None = None
    counting_answers: Tensor | None = None
    """As Microbatch has them."""
    ahead: tuple[Ahead, ...] = ()
    """One place, two places …: of models that predict further tokens, where anything goes backward."""
    counting: Tensor | None = None
    """float32 []: the sum of the whole microbatch's weights, where ahead has any."""
    scores: LargestScores | None = None
    """Where attention is to leave its largest scores; None: nowhere."""
    _seen: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    def seen(self, keys: int, window: int | None) -> Tensor | None:
        """bool [batch or 1, 1, queries, keys]: which keys of a cache each query sees; made once for all layers of the same window.

        None: one token sees all of them.
        """
        if (keys, window) not in self._seen:
            alone = self.positions.numel() == 1 and (window is None or window >= keys)
            self._seen[keys, window] = None if alone else seen(self.positions, keys, window)
        return self._seen[keys, window]


def seen(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """bool [batch or 1, 1, queries, keys]: which keys queries at these positions ([queries, batch or 1]) see."""
    back = positions.t()[:, None, :, None] - torch.arange(keys, device=positions.device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


class Places(NamedTuple):
    """Of a pass; see there."""

    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None
    local_rotary: tuple[Tensor, Tensor] | None


class Passes:
    """Makes them, with whatever depends on nothing but the length of a sequence made once."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, context: ContextGroup | None = None
    ) -> None:
        """context: the ranks that share each sequence. Raises NotExpressible for positions that there is no code for."""
        self._device, self._context, self._depths = device, context, config.mtp_layers
        self._rotary = Rotary(config, device, dtype) if config.positions.kind == "rope" else None
        local = local_positions(config)
        self._local_rotary = None if local is None else Rotary(local, device, dtype)
        self._whole: dict[int, Places] = {}

    def make(
        self,
        batch: Microbatch,
        *,
        share: float = 0.0,
        seed: rng.Seed | None = None,
        balance: Balance | None = None,
        cache: Cache | None = None,
        scores: LargestScores | None = None,
    ) -> Pass:
        """batch: with whole sequences. share, seed, balance, cache, scores: see Pass."""
        places = self._places(batch.tokens, batch.positions)
        weights = None if batch.loss_mask is None else self._own(batch.loss_mask.float())
        packed = None if batch.documents is None else Packed(batch.documents, self._device)
        counting, ahead = self._ahead(batch, packed) if self._depths and torch.is_grad_enabled() else (None, ())
        return Pass(
            self._own(batch.tokens), self._own(batch.labels), weights, *places, packed, self._context,
            share, batch.reference, seed, balance, cache, self._source(batch, seed), batch.types, batch.visible, batch.swapped,
            batch.answers, batch.counting, ahead, counting, scores,
        )  # fmt: skip

    def _ahead(self, batch: Microbatch, packed: Packed | None) -> tuple[Tensor, tuple[Ahead, ...]]:
        """Moved before they are cut: what comes next may be another rank's."""
        tokens, labels, ends = batch.tokens, batch.labels, _ends(batch.tokens, packed)
        weights = torch.ones_like(labels, dtype=torch.float32) if batch.loss_mask is None else batch.loss_mask.float()
        counting, found = weights.sum(), []
        for _ in range(self._depths):
            tokens, labels, weights = (x.roll(-1, 1).masked_fill(ends, 0) for x in (tokens, labels, weights))
            found.append(Ahead(self._own(tokens), self._own(labels), self._own(weights), weights.sum()))
        return counting, tuple(found)

    def _own(self, x: Tensor, axis: int = 1) -> Tensor:
        return x if self._context is None else self._context.own_part(x, axis)

    def _source(self, batch: Microbatch, seed: rng.Seed | None) -> Pass | None:
        source, visible = batch.source, batch.source_visible
        if source is None:
            return None
        return Pass(
            source, source, None, *self._places(source, None), seed=None if seed is None else seed.of_source(),
            visible=torch.ones_like(source, dtype=torch.bool) if visible is None else visible,
        )  # fmt: skip

    def _places(self, tokens: Tensor, positions: Tensor | None) -> "Places":
        if positions is not None:
            return self._at(positions.t())
        length = tokens.shape[1]
        if length not in self._whole:
            with torch.inference_mode(False):  # a pass that is trained on may come next
                self._whole[length] = self._at(torch.arange(length, device=self._device).unsqueeze(1))
        return self._whole[length]

    def _at(self, positions: Tensor) -> "Places":
        own = self._own(positions, 0)
        tables, local = (None if each is None else each.tables(own) for each in (self._rotary, self._local_rotary))
        return Places(own, tables, local)


def _ends(tokens: Tensor, packed: Packed | None) -> Tensor:
    """bool [batch, sequence]: the last token of each document."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    if packed is None:
        ends[:, -1] = True
    else:
        ends.view(-1)[packed.cu_seqlens[1:].long() - 1] = True
    return ends
