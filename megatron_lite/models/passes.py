"""A pass: the data of one microbatch that all parts of a model share, prepared once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models import rng
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.cache import Cache
from megatron_lite.models.carried import Carried
from megatron_lite.models.masks import cache_mask
from megatron_lite.models.moe.balance import Balance
from megatron_lite.models.pictures import PlacedPictures, Spread
from megatron_lite.models.rotary import Rotary, local_positions, usual_positions
from megatron_lite.models.teaching import Teaching
from megatron_lite.parallel.context import ContextGroup


class Document(NamedTuple):
    """A document of a packed row: tokens [start, end)."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def place(self) -> tuple[slice, slice]:
        """Its index in tensors [sequence, batch, ...]."""
        return slice(self.start, self.end), slice(self.row, self.row + 1)


class Packed:
    """The ends of documents in packed rows. Documents don't attend to each other.

    This is a class so that torch.compile doesn't inspect the numbers; it would recompile for every other value.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device) -> None:
        """lengths: for each row the lengths of its documents, which add up to the row."""
        self.lengths = tuple(map(tuple, lengths))
        each = list(chain.from_iterable(lengths))
        ends = torch.tensor(
            [0, *accumulate(each)], dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.cu_seqlens = ends.to(device, non_blocking=True)
        """int32 [documents + 1], row after row: the start of each document, and the end of the last one."""
        self.longest = max(each)
        self._numbers: Tensor | None = None
        self._ends: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """int64 [documents + 1]: cu_seqlens for kernels that want it so. It is the same tensor for all layers."""
        if self._ends is None:
            self._ends = self.cu_seqlens.long()
        return self._ends

    @property
    def numbers(self) -> Tensor:
        """int64 [batch, sequence]: the number of each token's document. It is computed once for all layers."""
        if self._numbers is None:
            lengths = self.cu_seqlens.diff()
            tokens = len(self.lengths) * sum(self.lengths[0])
            each = torch.arange(len(lengths), device=lengths.device)
            numbers = each.repeat_interleave(lengths, output_size=tokens)
            self._numbers = numbers.view(len(self.lengths), -1)
        return self._numbers

    def rows(self) -> Iterator[list[Document]]:
        """Yield the documents of each row, in order."""
        for row, lengths in enumerate(self.lengths):
            ends = list(accumulate(lengths))
            starts = [0, *ends[:-1]]
            yield [Document(row, start, end) for start, end in zip(starts, ends, strict=True)]

    def documents(self) -> Iterator[Document]:
        """Yield all documents, row after row."""
        for documents in self.rows():
            yield from documents


@dataclass(frozen=True)
class Ahead:
    """The inputs of a layer that predicts further tokens: [batch, sequence] of this rank's part, shifted to the left."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    """float32; 0 where a document has no token that far ahead."""
    counting: Tensor
    """float32 []: the sum of the whole microbatch's weights."""
    pictures: PlacedPictures | None
    """The images among the tokens; None without images."""


class LargestScores:
    """The largest attention scores in one pass of a microbatch. A class, so that torch.compile never inspects it."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}
        """float32 [heads]: of this rank's heads (-inf at first for heads that another context rank computes)."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The data of one microbatch's pass. All chunks of a rank get the same pass."""

    tokens: Tensor
    """int64 [batch, sequence]: this rank's part of the microbatch, as in the following fields."""
    labels: Tensor
    """int64 [batch, sequence]."""
    weights: Tensor | None
    """float32 [batch, sequence]: weight of each label; None: all 1."""
    positions: Tensor
    """int64 [sequence, batch or 1]."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of these positions, [sequence, batch or 1, 1, rotated]; see rotary.py. None without rotary positions."""
    local_rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin for layers with a window if these have another base; None if not."""
    pictures: PlacedPictures | None = None
    """None without images."""
    joint: Tensor | None = None
    """Of whole rows."""
    joint_in_windows: bool = False
    """joint, joint_in_windows: see Microbatch."""
    packed: Packed | None = None
    """The documents of whole rows; None: each row is one document."""
    context: ContextGroup | None = None
    """The ranks that have the other parts of each row; None: this rank has whole rows."""
    share: float = 0.0
    """The factor of each label's (or pair's, or example's) loss in the backward pass."""
    seed: rng.Seed | None = None
    """The seed of dropout; None: no dropout."""
    balance: Balance | None = None
    """Load balancing of experts; None without a backward pass."""
    cache: Cache | None = None
    """The mixers' cache of earlier tokens; None: there are none."""
    source: "Pass | None" = None
    """The pass of the encoder, to whose output the decoder attends; None without an encoder."""
    types: Tensor | None = None
    visible: Tensor | None = None
    teaching: Teaching | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """types, visible, teaching, extras: see Microbatch."""
    ahead: tuple[Ahead, ...] = ()
    """Inputs for 1, 2 … tokens ahead, for models that predict further tokens; only with a backward pass."""
    counting: Tensor | None = None
    """float32 []: the sum of the whole microbatch's weights; None if `ahead` is empty."""
    scores: LargestScores | None = None
    """The place where attention stores its largest scores; None: they are not stored."""
    carried: Carried | None = None
    """The tensors that a layer reads and writes beside its hidden states; None in models without such tensors."""
    in_order: bool = False
    """True if each row has the positions 0, 1, 2 … Otherwise they may have any order."""
    visibility: dict[int, Any] = field(default_factory=dict)
    """The data that select the keys of a query, for all layers, by the number of keys; see scored_attention.py."""
    _seen: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    @property
    def documents(self) -> Tensor | None:
        """int64 [batch, sequence]: the number of each token's document; None unless rows are packed."""
        return None if self.packed is None else self.packed.numbers

    def states(self, layer: int, number: int) -> tuple[Tensor | None, ...]:
        """Return the states, of this number, that a layer kept of earlier tokens. None: there are no earlier tokens."""
        return (None,) * number if self.cache is None else self.cache.states(layer)

    def keep(self, layer: int, *states: Tensor) -> None:
        """Keep the states of a layer for later tokens, if there may be any."""
        if self.cache is not None:
            self.cache.keep(layer, *states)

    def label_weights(self) -> Tensor:
        """Return float32 [batch, sequence]: the weight of each label."""
        return (
            torch.ones_like(self.labels, dtype=torch.float32)
            if self.weights is None
            else self.weights
        )

    def seen(self, keys: int, window: int | None) -> Tensor | None:
        """Return bool [batch or 1, 1, queries, keys]: the keys of a cache that each query attends to.

        It is computed once for all layers with the same window. None: a single query attends to all keys.
        """
        if (keys, window) not in self._seen:
            alone = self.positions.numel() == 1 and (window is None or window >= keys)
            self._seen[keys, window] = None if alone else cache_mask(self.positions, keys, window)
        return self._seen[keys, window]


class Places(NamedTuple):
    """The positions of a pass; see Pass."""

    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None
    local_rotary: tuple[Tensor, Tensor] | None


class Passes:
    """Makes passes. Values that depend only on the length of a sequence are computed once."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        context: ContextGroup | None = None,
        ahead: int = 0,
    ) -> None:
        """context: the ranks that share each sequence. ahead: MTP layers that are trained.

        Raises NotExpressible for unsupported positions.
        """
        self._device, self._context, self._depths = device, context, ahead
        self._has_types = config.token_types > 0
        rotates = config.positions.kind == "rope"
        self._rotary = Rotary(usual_positions(config), device, dtype) if rotates else None
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
        """Make a pass. batch: with whole sequences. share, seed, balance, cache, scores: see Pass."""
        places = self._places(batch.tokens, batch.positions, batch.pair_positions)
        weights = None if batch.loss_mask is None else self._own(batch.loss_mask.float())
        packed = None if batch.documents is None else Packed(batch.documents, self._device)
        pictures = None if batch.pictures is None else batch.pictures.spread()
        counting, ahead = (
            self._ahead(batch, packed, pictures)
            if self._depths and torch.is_grad_enabled()
            else (None, ())
        )
        return Pass(
            tokens=self._own(batch.tokens),
            labels=self._own(batch.labels),
            weights=weights,
            positions=places.positions,
            in_order=batch.positions is None,
            rotary=places.rotary,
            local_rotary=places.local_rotary,
            pictures=None if pictures is None else pictures.own(self._own),
            joint=batch.joint,
            joint_in_windows=batch.joint_in_windows,
            packed=packed,
            context=self._context,
            share=share,
            seed=seed,
            balance=balance,
            cache=cache,
            source=self._source(batch, seed),
            types=batch.types,
            visible=batch.visible,
            teaching=batch.teaching,
            extras=batch.extras,
            ahead=ahead,
            counting=counting,
            scores=scores,
        )

    def _ahead(
        self, batch: Microbatch, packed: Packed | None, pictures: Spread | None
    ) -> tuple[Tensor, tuple[Ahead, ...]]:
        """Return (sum of weights, inputs of each depth). Shift before sharding: the next token may be on another rank."""
        tokens = batch.tokens
        labels = batch.labels
        ends = _ends(tokens, packed)
        weights = (
            torch.ones_like(labels, dtype=torch.float32)
            if batch.loss_mask is None
            else batch.loss_mask.float()
        )
        counting = weights.sum()
        found = []
        for _ in range(self._depths):
            # Shift by one position. A document's last token has no next token.
            tokens, labels, weights = (
                x.roll(-1, 1).masked_fill(ends, 0) for x in (tokens, labels, weights)
            )
            pictures = None if pictures is None else pictures.ahead(ends)
            own = self._own
            ahead = Ahead(
                own(tokens),
                own(labels),
                own(weights),
                weights.sum(),
                None if pictures is None else pictures.own(own),
            )
            found.append(ahead)
        return counting, tuple(found)

    def _own(self, x: Tensor, axis: int = 1) -> Tensor:
        return x if self._context is None else self._context.own_part(x, axis)

    def _source(self, batch: Microbatch, seed: rng.Seed | None) -> Pass | None:
        source, visible = batch.source, batch.source_visible
        if source is None:
            return None
        places = self._places(source)
        return Pass(
            tokens=source,
            labels=source,
            weights=None,
            positions=places.positions,
            rotary=places.rotary,
            local_rotary=places.local_rotary,
            seed=None if seed is None else seed.of_source(),
            types=torch.zeros_like(source) if self._has_types else None,
            visible=torch.ones_like(source, dtype=torch.bool) if visible is None else visible,
        )

    def _places(
        self, tokens: Tensor, positions: Tensor | None = None, pairs: Tensor | None = None
    ) -> "Places":
        """pairs: see Microbatch.pair_positions."""
        length = tokens.shape[1]
        if positions is None and pairs is not None:
            positions = torch.arange(length, device=self._device).unsqueeze(0)
        if positions is not None:
            return self._at(positions.t(), None if pairs is None else pairs.transpose(0, 1))
        if length not in self._whole:
            with torch.inference_mode(False):  # a training pass may use these tensors later
                self._whole[length] = self._at(
                    torch.arange(length, device=self._device).unsqueeze(1)
                )
        return self._whole[length]

    def _at(self, positions: Tensor, pairs: Tensor | None = None) -> "Places":
        own = self._own(positions, 0)
        rotated = own if pairs is None else self._own(pairs, 0)
        return Places(
            own,
            None if self._rotary is None else self._rotary.tables(rotated),
            None if self._local_rotary is None else self._local_rotary.tables(own),
        )


def _ends(tokens: Tensor, packed: Packed | None) -> Tensor:
    """Return bool [batch, sequence]: True for the last token of each document."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    if packed is None:
        ends[:, -1] = True
    else:
        ends.view(-1)[packed.cu_seqlens[1:].long() - 1] = True
    return ends
