"""Passes of a rank's chunks: the losses, log-probabilities and logits of microbatches, without an optimizer."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megaconv.model.predicting import kind_of_layer
from megaconv.planning.carried import caches_keys
from megaconv.planning.mixers import in_layer
from megaconv.planning.pipeline_order import Action, forward_order
from megatron_lite.models import rng
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.cache import Cache
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.models.layer_kinds import layer_shares
from megatron_lite.models.mixers.declaration import Kept
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.models.network_interface import Network
from megatron_lite.models.passes import Pass, Passes
from megatron_lite.models.teaching import Teaching
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.pipeline import Executor
from megatron_lite.rank.arriving import arriving_tensors
from megatron_lite.rank.chunks import dtype_of
from megatron_lite.rank.collecting_pass import CollectingPass, T
from megatron_lite.rank.held_parameters import RankParameters
from megatron_lite.rank.loss_sums import LabelLosses, LossSum, RowSums
from megatron_lite.rank.totals import sum_over_world
from megatron_lite.settings.options import ModelOptions


class RankComputation(RankParameters):
    """Computes one rank's part of a model. The engine sets the attributes."""

    config: ModelConfig
    grid: Grid
    options: ModelOptions
    dtype: torch.dtype
    criterion: Criterion
    step: int
    """Part of the seed of dropout."""
    _loss_names: Sequence[str]
    _context: Any
    """The context-parallel group; None without one."""
    _passes: Passes
    _sizes: dict[str, int]
    _autocast: Any

    @abstractmethod
    def finish(self) -> None:
        """Wait for all communication. Call it before parameters are read (a save) and before exit."""

    def dtype_of(self, info: ParameterInfo) -> torch.dtype:
        """Return the dtype of a parameter: the model's, or float32 if its module declares that."""
        return dtype_of(info, self.dtype)

    def cache_of(self, layer: int) -> tuple[Kept, ...]:
        """Return the parts of a row's cache that the mixer of a layer declares, for this rank's heads.

        layer: numbers after the last layer stand for the layers inside MTP layers.
        """
        kind = kind_of_layer(self.config, layer)
        mixer = mixer_of(self.config, kind)
        if mixer is None or not caches_keys(self.config, layer, self._stage_of(layer)):
            return ()
        sizes = layer_shares(self.config, layer, self._sizes, self.grid.layout.tp)
        return mixer.cache(in_layer(self.config, kind), sizes)

    def _stage_of(self, layer: int) -> int:
        """Return the first layer of the stage of a layer; of any stage, not only of this rank."""
        firsts = (chunk.first_layer for chunk in self.grid.layout.chunks())
        return max(first for first in firsts if first <= layer)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[str, tuple[float, float]]:
        """Return (sum, number of tokens or pairs that count) by loss name, over all data-parallel ranks.

        Every rank returns the same values.
        """
        layout = self.grid.layout
        losses = LossSum(self._loss_names, self.grid.device, 1.0)
        actions = forward_order(layout.pp, layout.vpp, len(microbatches))
        microbatches = self._with_extras(microbatches, drops=False)
        with torch.no_grad():
            self._run(actions, microbatches, losses)
        no_gradient = torch.zeros((), device=self.grid.device)
        totals = sum_over_world(losses, no_gradient, (), self.grid)
        return dict(zip(self._loss_names, totals.losses, strict=True))

    def log_probs(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return each row's summed log-probability of its labels that count: float64 [dp, microbatches, rows]. Collective.

        Every rank returns the values of all data-parallel ranks.
        microbatches: of this data-parallel rank; the same number on each rank, all of one shape.
        """
        grid = self.grid
        layout = grid.layout
        count = len(microbatches)
        losses = RowSums()
        actions = forward_order(layout.pp, layout.vpp, count)
        with torch.no_grad():
            self._run(actions, microbatches, losses, criterion=OWN_LOSS)
        rows = len(microbatches[0].tokens)
        sums = torch.zeros((grid.dp, count, rows), dtype=torch.float64, device=grid.device)
        # Only the last stage has losses, and its tensor ranks have the same ones.
        if losses.found and grid.tp_rank == 0:
            sums[grid.dp_rank] = torch.stack(losses.found)
        comm.all_reduce(sums, grid.group("world"))
        return -sums

    def label_log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the log-probability of each label: float32 [rows, sequence] of each microbatch. Collective.

        Stages other than the last one return []. Labels without a weight have a value too.
        """
        layout = self.grid.layout
        losses = LabelLosses()
        actions = forward_order(layout.pp, layout.vpp, len(microbatches))
        with torch.no_grad():
            self._run(actions, microbatches, losses, criterion=OWN_LOSS)
        return [-each for each in losses.found]

    def teaching(self, microbatches: Sequence[Microbatch]) -> list[Teaching]:
        """Return the predictions of each microbatch that a student learns. Collective. Stages other than the last one return []."""
        return self._collected(microbatches, _teaching)

    def logits(self, batch: Microbatch, cache: Cache | None = None) -> Tensor | None:
        """Return float32 [batch, sequence, vocabulary] on the last stage, None on others. Collective. cache: see last_stage."""
        with self.whole_parameters():
            last = self.last_stage(batch, cache)
            if last is None:
                return None
            chunk, hidden = last
            with torch.no_grad():
                own = chunk.logits((hidden,))
        return own if self._context is None else self._context.whole(own, 1)

    def last_stage(
        self, batch: Microbatch, cache: Cache | None = None
    ) -> tuple[Network, Tensor] | None:
        """Return (the last chunk, activations after its final norm) on the last stage, None on others. Collective.

        cache: of the preceding tokens; it is extended by these tokens. With a cache, the batch has to contain the positions.
        Raises ParametersFreed if parameters are sharded, outside whole_parameters(): the chunk would have no matrices.
        """
        self.require_whole_parameters()
        self.finish()  # the head's weight is used without calling the module, so no hook waits for it
        run = self.make_pass(batch, cache=cache)
        found: tuple[Network, Tensor] | None = None

        def forward(action: Action, taken: Payload) -> Payload:
            nonlocal found
            chunk = self.chunks[action.chunk]
            given: Payload = chunk(taken, run)
            if chunk.is_last:
                found = chunk, given[0]
            return given

        layout = self.grid.layout
        actions = forward_order(layout.pp, layout.vpp, 1)
        arriving = arriving_tensors(self.chunks, batch, self.grid.cp)
        executor = Executor(self.grid, forward, arriving, self._region)
        with torch.no_grad():
            executor.run(actions)
        return found

    def _run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
        losses: LossSum | RowSums | LabelLosses | CollectingPass[Any],
        before_backward: Any = lambda _: None,
        criterion: Criterion | None = None,
        *,
        drops: bool = False,
    ) -> None:
        """Run all actions. criterion: the loss; None: the engine's. drops: dropout is on also without gradients."""
        wanted = criterion or self.criterion
        last_chunk = len(self.chunks) - 1
        passes: dict[int, Pass] = {}  # passes that have not reached the last chunk, by microbatch

        def forward(action: Action, taken: Payload) -> Payload:
            chunk = self.chunks[action.chunk]
            number = action.microbatch
            if number not in passes:
                passes[number] = self._pass_of(microbatches[number], losses.share, drops=drops)
            run = passes.pop(number) if action.chunk == last_chunk else passes[number]
            given: Payload = chunk(taken, run)
            if not chunk.is_last:
                return given
            total, found = wanted.loss(chunk, given, run)
            return (losses.add(total, found),)

        arriving = arriving_tensors(self.chunks, microbatches[0], self.grid.cp)
        executor = Executor(self.grid, forward, arriving, self._region)
        executor.run(actions, before_backward)

    def _region(self, action: Action) -> AbstractContextManager[Any]:
        """Return the region in which a pass is computed: with its sharded tensors, and in Transformer Engine's region."""
        region = ExitStack()
        if self.buckets:
            # With one stage, the backward pass of a microbatch follows its forward pass.
            follows = torch.is_grad_enabled() and self.grid.layout.pp == 1 and not action.backward
            of_shards = self.buckets[action.chunk].computing(
                backward=action.backward, backward_follows=follows
            )
            region.enter_context(of_shards)
        if self._autocast is not None:
            of_products = self._autocast
            region.enter_context(
                of_products.backward_pass() if action.backward else of_products.forward_pass()
            )
        return region

    def make_pass(self, batch: Microbatch, cache: Cache | None = None) -> Pass:
        """Return a pass for chunks that are called one by one: without dropout, and not part of a training step."""
        return self._passes.make(batch, share=1.0, cache=cache)

    def _with_extras(
        self, microbatches: Sequence[Microbatch], *, drops: bool
    ) -> Sequence[Microbatch]:
        """Return the microbatches with what their losses need of each other, which a pass without gradients computes.

        drops: whether dropout is on, with the same dropped elements as in the pass that follows.
        """
        if not self.criterion.needs_all(len(microbatches)):
            return microbatches
        found = self._collected(microbatches, self.criterion.outputs, drops=drops)
        if not found:  # another stage has the loss
            return microbatches
        extras = self.criterion.extras(found, self.config.hidden)
        return [
            replace(batch, extras={**batch.extras, **further})
            for batch, further in zip(microbatches, extras, strict=True)
        ]

    def _collected(
        self,
        microbatches: Sequence[Microbatch],
        collect: Callable[[Network, Payload, Pass], T],
        *,
        drops: bool = False,
    ) -> list[T]:
        """Return what is collected of each microbatch, without gradients. Collective. Stages other than the last one return [].

        drops: see _run.
        """
        layout = self.grid.layout
        collecting = CollectingPass(collect)
        actions = forward_order(layout.pp, layout.vpp, len(microbatches))
        with torch.no_grad():
            self._run(actions, microbatches, collecting, criterion=collecting, drops=drops)
        return collecting.found

    def _pass_of(self, batch: Microbatch, share: float, *, drops: bool) -> Pass:
        """Return the pass of a microbatch. drops: dropout is on also without gradients."""
        seed = self._seed(batch) if drops else None
        return self._passes.make(batch, share=share, seed=seed)

    def _seed(self, batch: Microbatch) -> rng.Seed | None:
        """Return the seed of dropout in this step; None if no dropout is on."""
        if not self._drops:
            return None
        return rng.Seed(self.options.seed, self.step, batch.index, context=self._context)

    @property
    def _drops(self) -> bool:
        """True if any dropout is on."""
        options = self.options
        of_adapters = 0.0 if options.lora is None else options.lora.dropout
        of_encoder = max(options.retrieval.hidden_dropout, options.retrieval.attention_dropout)
        return max(options.hidden_dropout, options.attention_dropout, of_adapters, of_encoder) > 0


def _teaching(stage: Network, given: Payload, _run: Pass) -> Teaching:
    assert isinstance(stage, ModelChunk)
    return stage.teaching(given)
