"""One rank's part of a model in training: its chunks, gradients and optimizer, and the training step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megatron_lite.loss_sums import LossSum, RowSums
from megatron_lite.models import rng
from megatron_lite.models.batch import Lengths, Microbatch
from megatron_lite.models.build_plan import ExpertRanks, make_plan
from megatron_lite.models.cache import Cache
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.models.lora.attached import attach, check_targets
from megatron_lite.models.mixers.declaration import Kept
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.models.moe.balance import Balance, Step, mean_losses, tokens_by_layer
from megatron_lite.models.moe.router import Router
from megatron_lite.models.network_by_family import network
from megatron_lite.models.network_interface import Network
from megatron_lite.models.passes import Pass, Passes
from megatron_lite.optimizer.algorithm import Rates, TensorGroups
from megatron_lite.optimizer.algorithms import make_dealer
from megatron_lite.optimizer.buckets import ChunkBuckets
from megatron_lite.optimizer.clip import clip_factor, squares, sum_shares
from megatron_lite.optimizer.precision import LossScaler
from megatron_lite.optimizer.qk_clip import RowFactors, ScoreWatch, StepScores
from megatron_lite.optimizer.zero import Optimizer
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.parameter_kinds import declared
from megatron_lite.parallel.parameters import (
    ParameterInfo,
    adapter_info,
    parameter_infos,
    replace_parameter,
)
from megatron_lite.parallel.payload import Payload, Wires, with_gradient
from megatron_lite.parallel.pipeline import Executor
from megatron_lite.parallel.pipeline_order import Action, forward_order, last_backward, order
from megatron_lite.parallel.replicas import Differs, differing
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.products.fp8 import end_step
from megatron_lite.products.selection import autocast_of, check_device, delayed_products
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions

SEE_OTHER_TOKENS = ("tp", "replicas")
"""The grid axes along which routers of one layer route different tokens. Tensor ranks route their part of the sequence."""


@dataclass(frozen=True)
class StepReport:
    """The results of one step; the same on every rank."""

    loss: float
    """Mean over all tokens of the step that count, or over all pairs or examples."""
    tokens: float
    """The number of those tokens (the sum of the loss mask), pairs or examples."""
    grad_norm: float
    """Before clipping. Not finite if any gradient is not finite."""
    skipped: bool
    """True if gradients were not finite or no label counted. Parameters are then unchanged."""
    loss_scale: float
    """The loss scale that this step used."""
    signals: tuple[float, ...]
    """The sums over all ranks of the `signals` passed to train_step."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Means of the model's other losses, by name."""
    largest_score: float | None = None
    """The largest attention score, before any clip; None if no option requests it."""

    @property
    def empty(self) -> bool:
        """True if no label of the step counts."""
        return not self.tokens


class Totals(NamedTuple):
    """Sums of a step over all ranks."""

    losses: list[tuple[float, float]]
    """The sum of each loss, and the number of tokens or pairs that count."""
    square: float
    """The sum of squares of all gradients."""
    signals: list[float]


class Engine:
    """Trains one rank's part of a model. Every rank of the grid builds it from the same configuration.

    Parameters are zero until they are loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        options: ModelOptions,
        optimizer: OptimizerOptions | None,
        criterion: Criterion = OWN_LOSS,
    ) -> None:
        """Build the chunks. optimizer: None for evaluation only. criterion: the loss.

        Raises NotExpressible if the model can't be trained, LayoutError if it can't be sharded.
        """
        self.config, self.grid, self.options = config, grid, options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.step = 0
        """Calls of train_step so far; part of the seed of dropout. Set it when a run resumes."""
        self._balances: list[Balance] = []
        """The balances of the last step's microbatches."""
        self._balanced = Step()
        kind = network(config.family)
        criterion.check(config)
        self.criterion = criterion
        self._loss_names = criterion.loss_names(config)
        self._context = self._context_group()
        self._passes = Passes(config, grid.device, self.dtype, self._context)
        self.chunks: list[Network] = []
        """Virtual stages in order. Parameters have Megatron core's names; layers count from 0 in each chunk."""
        self.infos: list[list[ParameterInfo]] = []
        """The parameters of each chunk."""
        self.adapters: list[list[ParameterInfo]] = []
        """The adapters of each chunk if only adapters are trained; empty lists if not."""
        self._build_chunks(kind)
        self._autocast = autocast_of(self.chunks, options.fp8, grid.group("replicas"))
        self._delayed = [product for chunk in self.chunks for _, product in delayed_products(chunk)]
        self.buckets: list[ChunkBuckets] = []
        self.optimizer: Optimizer | None = None
        self._watch: ScoreWatch | None = None
        fp16_scale = (
            optimizer.loss_scale if optimizer is not None and self.dtype == torch.float16 else None
        )
        self.scaler = LossScaler(fp16_scale)
        self._make_untrained(evaluates=optimizer is None)
        if optimizer is not None:
            self._prepare_training(optimizer)

    def _build_chunks(self, kind: type[Network]) -> None:
        """Build the chunks on the meta device, with adapters if these are trained."""
        config, grid, options = self.config, self.grid, self.options
        tp, lora = grid.layout.tp, options.lora
        check_device(options.fp8, grid.device, tp)
        ranks = TensorGroup(
            grid.group("tp"), grid.tp_rank, tp, options.sequence_parallel and tp > 1
        )
        experts = ExpertRanks(experts=grid.group("ep"), parts=grid.group("etp"))
        plan = make_plan(config, grid.layout, options, ranks, experts)
        self._sizes = plan.sizes
        for index, chunk in enumerate(grid.chunks()):
            with torch.device("meta"):
                module = kind(plan, chunk)
            infos = parameter_infos(
                declared(module),
                config,
                grid,
                index,
                chunk,
                plan.vocab_rows,
                sequence=ranks.sequence,
                frozen=lora is not None,
            )
            self.chunks.append(module)
            self.infos.append(list(infos))
            self.adapters.append([])
            if lora is not None:
                self.adapters[index] = self._attach_adapters(index, lora, ranks)
        if lora is not None:
            check_targets(config, lora.targets, found=any(self.adapters))

    def _attach_adapters(self, index: int, lora: LoRA, ranks: TensorGroup) -> list[ParameterInfo]:
        """Add adapters to a chunk and return their parameters."""
        tp = self.grid.layout.tp
        module = self.chunks[index]
        natives = [info.native for info in self.infos[index]]
        with torch.device("meta"):
            made = list(attach(module, natives, self.config, lora, ranks))
        found = []
        for native, kind in made:
            info = adapter_info(index, native, kind, tp, sequence=ranks.sequence)
            found.append(info)
        return found

    def _make_untrained(self, *, evaluates: bool) -> None:
        """Allocate the parameters that have no gradient: all of them if the engine only evaluates."""
        for module, infos, adapters in zip(self.chunks, self.infos, self.adapters, strict=True):
            for info in (*infos, *adapters):
                if info.trained and not evaluates:
                    continue
                zeros = torch.zeros(
                    info.native.shape, dtype=self.dtype_of(info), device=self.grid.device
                )
                parameter = nn.Parameter(zeros, requires_grad=False)
                replace_parameter(module, info.name, parameter)

    def dtype_of(self, info: ParameterInfo) -> torch.dtype:
        """Return the dtype of a parameter: the model's, or float32 if its module declares that."""
        return torch.float32 if info.in_float32 else self.dtype

    def cache_of(self, layer: int) -> tuple[Kept, ...]:
        """Return the parts of a row's cache that the mixer of a layer declares, for this rank's heads."""
        mixer = mixer_of(self.config, self.config.layers[layer])
        return () if mixer is None else mixer.cache(self.config, self._sizes)

    def _context_group(self) -> ContextGroup | None:
        grid, how, near = self.grid, self.options.context, self.options.near
        group, close, far = (grid.group(axis) for axis in ("cp", "cp_near", "cp_far"))
        if group is None:
            return None
        levels = None
        if close is not None and far is not None:
            levels = (
                ContextGroup(close, grid.cp_rank % near, near, "a2a"),
                ContextGroup(far, grid.cp_rank // near, grid.cp // near, "p2p"),
            )
        return ContextGroup(group, grid.cp_rank, grid.cp, how, levels)

    def _prepare_training(self, optimizer: OptimizerOptions) -> None:
        """Make the buckets, which hold the trained parameters, and the optimizer."""
        grid, dealer = self.grid, make_dealer(optimizer)
        for module, infos, adapters in zip(self.chunks, self.infos, self.adapters, strict=True):
            trained = [info for info in (*infos, *adapters) if info.trained]
            buckets = ChunkBuckets(
                module,
                trained,
                self.dtype,
                grid.device,
                grid.group,
                bucket_elements=optimizer.bucket_elements,
                distributed=optimizer.distributed,
                sent_as=torch.bfloat16 if optimizer.bf16_reduce else torch.float32,
                overlap=optimizer.overlap_grad_reduce,
                dealer=dealer,
            )
            buckets.wait_before(module.units())
            self.buckets.append(buckets)
        groups = TensorGroups(grid.group("tp"), grid.group("etp"))
        self.optimizer = Optimizer(self.buckets, optimizer, groups)
        if optimizer.qk_clip is not None or optimizer.tell_scores:
            self._watch = ScoreWatch(self.chunks, grid.group("replicas"), grid.group("world"))

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        lr: float,
        weight_decay: float = 0.0,
        signals: Sequence[float] = (),
        decoupled_lr: float | None = None,
    ) -> StepReport:
        """Run one step: forward, backward, reduce, clip, update.

        microbatches: of this data-parallel rank, all of one shape.
        signals: any numbers (for example a request to stop), which are summed over all ranks in the same collective.
        decoupled_lr: the learning rate of embedding and head.
        """
        assert self.optimizer is not None, "the engine was made for evaluation"
        # Weight of each position in the mean as if all labels counted. `factor` below corrects for labels that don't count.
        positions = self.grid.dp * sum(map(self.criterion.counts, microbatches))
        scale = self.scaler.scale
        losses = LossSum(self._loss_names, self.grid.device, scale / positions)
        self._begin_step()
        self._pass_forward_and_back(microbatches, losses)
        square = self._reduce_gradients(self.optimizer)
        scores = None if self._watch is None else self._watch.found()
        totals = self._sum_over_world(losses, square, signals)
        # Here the host has waited for all of the device's work. After the update it would wait for the update too.
        largest_score = None if scores is None else float(scores.top)
        loss, tokens = totals.losses[0]
        norm, factor = 0.0, 1.0
        if tokens:
            # Correct the mean for labels that don't count, and remove the loss scale.
            factor = positions / tokens / scale
            norm = sqrt(totals.square) * factor if isfinite(totals.square) else float("inf")
            self.scaler.update(overflow=not isfinite(norm))
            self._move_expert_biases()
        skipped = not tokens or not isfinite(norm)
        if not skipped:
            factor *= clip_factor(norm, self.optimizer.options.clip_grad)
            rates = Rates(lr, weight_decay, decoupled_lr)
            self.optimizer.step(rates, factor, self._row_factors(scores))
        end_step(self._delayed, self._raise_to_largest)
        self.step += 1
        return StepReport(
            loss=loss / (tokens or 1.0),
            tokens=tokens,
            grad_norm=norm,
            skipped=skipped,
            loss_scale=scale,
            signals=tuple(totals.signals),
            others=self._means_of_others(totals),
            largest_score=largest_score,
        )

    def _begin_step(self) -> None:
        for buckets in self.buckets:
            buckets.begin()
        self._balances.clear()
        self._balanced = Step(self._see_other_tokens())
        if self._watch is not None:
            self._watch.begin()

    def _pass_forward_and_back(self, microbatches: Sequence[Microbatch], losses: LossSum) -> None:
        """Run all passes of a step. Buckets start to be reduced in the last backward pass of their chunk."""
        layout = self.grid.layout
        actions = order(layout.pp, layout.vpp, len(microbatches), self.grid.pp_rank)
        completing = last_backward(actions)

        def before_backward(action: Action) -> None:
            self.buckets[action.chunk].is_last_pass = action in completing

        self._run(actions, microbatches, losses, before_backward)

    def _reduce_gradients(self, optimizer: Optimizer) -> Tensor:
        """Complete the gradients and return the sum of squares that this rank counts, float64 []."""
        for buckets in self.buckets:
            buckets.finish()
        sum_shares(optimizer.ranges(), self.grid)
        return squares(optimizer.ranges(), self.grid, distributed=optimizer.distributed)

    def _row_factors(self, scores: StepScores | None) -> RowFactors:
        """Return the factors of QK-clip; none if it is off."""
        assert self.optimizer is not None
        clip = self.optimizer.options.qk_clip
        return {} if scores is None or clip is None else scores.row_factors(clip)

    def _means_of_others(self, totals: "Totals") -> dict[str, float]:
        """Return the means of all losses except the first, by name."""
        others = zip(self._loss_names[1:], totals.losses[1:], strict=True)
        return {name: total / (count or 1.0) for name, (total, count) in others}

    def _see_other_tokens(self) -> list[comm.Group]:
        """Return the groups of ranks that route different tokens of one layer."""
        return [self.grid.group(axis) for axis in SEE_OTHER_TOKENS]

    def _raise_to_largest(self, values: Tensor) -> None:
        """Raise values, in place, to the largest ones of the ranks that see other tokens of the same layers."""
        for axis in SEE_OTHER_TOKENS:
            comm.largest(values, self.grid.group(axis))

    def _move_expert_biases(self) -> None:
        """Update the routers' expert biases from the tokens of all ranks of the stage.

        As in Megatron, the update also happens in a step that fp16 skips.
        """
        if (
            not self.config.experts.router_bias
            or not self.options.balance.bias_rate
            or self.options.lora is not None
        ):
            return
        modules = (module for chunk in self.chunks for module in chunk.modules())
        routers = [
            module
            for module in modules
            if isinstance(module, Router) and module.expert_bias is not None
        ]
        if not routers:  # a stage may have only dense layers
            return
        found = tokens_by_layer(self._balances)
        tokens = torch.stack([found[router.layer] for router in routers])
        for group in self._see_other_tokens():
            comm.all_reduce(tokens, group)
        for router, counts in zip(routers, tokens, strict=True):
            router.move_bias(counts)

    def balancing_losses(self) -> dict[str, dict[int, float]]:
        """Return the balancing losses of the last step by name and layer, before coefficients.

        A value is the share of this rank's tokens in the loss, averaged over this rank's microbatches.
        """
        return mean_losses(self._balances)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[str, tuple[float, float]]:
        """Return (sum, number of tokens or pairs that count) by loss name, over all data-parallel ranks.

        Every rank returns the same values.
        """
        layout = self.grid.layout
        losses = LossSum(self._loss_names, self.grid.device, 1.0)
        actions = forward_order(layout.pp, layout.vpp, len(microbatches))
        with torch.no_grad():
            self._run(actions, microbatches, losses)
        no_gradient = torch.zeros((), device=self.grid.device)
        totals = self._sum_over_world(losses, no_gradient, ())
        return dict(zip(self._loss_names, totals.losses, strict=True))

    def log_probs(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return each row's summed log-probability of its labels that count: float64 [dp, microbatches, rows]. Collective.

        Every rank returns the values of all data-parallel ranks.
        microbatches: of this data-parallel rank; the same number on each rank, all of one shape.
        """
        layout, rows, grid = self.grid.layout, RowSums(), self.grid
        with torch.no_grad():
            actions = forward_order(layout.pp, layout.vpp, len(microbatches))
            self._run(actions, microbatches, rows, criterion=OWN_LOSS)
        shape = grid.dp, len(microbatches), len(microbatches[0].tokens)
        sums = torch.zeros(shape, dtype=torch.float64, device=grid.device)
        if rows.found and not grid.tp_rank:
            sums[grid.dp_rank] = torch.stack(rows.found)
        comm.all_reduce(sums, grid.group("world"))
        return -sums

    def logits(self, batch: Microbatch, cache: Cache | None = None) -> Tensor | None:
        """Return float32 [batch, sequence, vocabulary] on the last stage, None on others. Collective. cache: see last_stage."""
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
        """
        self.finish()  # the head's weight is used without calling the module, so no hook waits for it
        run = self.make_pass(batch, cache=cache)
        found: list[tuple[Network, Tensor]] = []

        def forward(action: Action, taken: Payload) -> Payload:
            chunk = self.chunks[action.chunk]
            given: Payload = chunk(taken, run)
            if chunk.is_last:
                found.append((chunk, given[0]))
            return given

        layout = self.grid.layout
        with torch.no_grad():
            Executor(self.grid, forward, self._arriving(batch), self._region).run(
                forward_order(layout.pp, layout.vpp, 1)
            )
        return found[0] if found else None

    def _run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
        losses: LossSum | RowSums,
        before_backward: Any = lambda _: None,
        criterion: Criterion | None = None,
    ) -> None:
        """Run all actions. criterion: the loss; None: the engine's."""
        under_way, wanted = dict[int, Pass](), criterion or self.criterion

        def forward(action: Action, taken: Payload) -> Payload:
            chunk, number = self.chunks[action.chunk], action.microbatch
            if number not in under_way:
                under_way[number] = self._training_pass(microbatches[number], losses.share)
            run = (
                under_way.pop(number) if action.chunk == len(self.chunks) - 1 else under_way[number]
            )
            given: Payload = chunk(taken, run)
            return (losses.add(*wanted.loss(chunk, given, run)),) if chunk.is_last else given

        arriving = self._arriving(microbatches[0])
        Executor(self.grid, forward, arriving, self._region).run(actions, before_backward)

    def _region(self, action: Action) -> AbstractContextManager[Any]:
        """Return the region in which a pass is computed: Transformer Engine's, or one without effect."""
        if self._autocast is None:
            return nullcontext()
        if action.backward:
            return self._autocast.backward_pass()
        return self._autocast.forward_pass()

    def make_pass(self, batch: Microbatch, cache: Cache | None = None) -> Pass:
        """Return a pass for chunks that are called one by one: without dropout, and not part of a training step."""
        return self._passes.make(batch, share=1.0, cache=cache)

    def _training_pass(self, batch: Microbatch, share: float) -> Pass:
        if not torch.is_grad_enabled():
            return self._passes.make(batch, share=share)
        lora = 0.0 if self.options.lora is None else self.options.lora.dropout
        drops = max(self.options.hidden_dropout, self.options.attention_dropout, lora) > 0
        seed = (
            rng.Seed(self.options.seed, self.step, batch.index, context=self._context)
            if drops
            else None
        )
        balance = Balance(
            share * self.criterion.counts(batch), self._balanced, self.grid.group("cp")
        )
        self._balances.append(balance)
        scores = None if self._watch is None else self._watch.of_pass()
        return self._passes.make(batch, share=share, seed=seed, balance=balance, scores=scores)

    def _arriving(self, batch: Microbatch) -> Callable[[Action], Wires]:
        """Return a function: action -> the tensors that it receives from another stage, for microbatches of this shape."""
        rows, length = batch.tokens.shape
        lengths = Lengths(
            rows, length // self.grid.cp, 0 if batch.source is None else batch.source.shape[1]
        )

        def wires(action: Action) -> Wires:
            chunk = self.chunks[action.chunk]
            return with_gradient(chunk.gives(lengths)) if action.backward else chunk.takes(lengths)

        return wires

    def _sum_over_world(self, losses: LossSum, square: Tensor, signals: Sequence[float]) -> Totals:
        """Return the sums over all ranks. square: the sum of squares of the gradients that this rank counts.

        This is the one collective over all ranks in a step, and the only time that the step waits for the GPU.
        """
        # Other tensor ranks of the last stage have the same losses.
        is_first = self.grid.tp_rank == 0
        own_losses = losses.sums.flatten() * float(is_first)
        own_square = square.to(torch.float64).view(1)
        values = torch.cat([own_losses, own_square, self._on_device(signals)])
        comm.all_reduce(values, self.grid.group("world"))
        found = values.tolist()
        end = len(own_losses)
        sums, counts_of_sums = found[0:end:2], found[1:end:2]
        return Totals(
            losses=list(zip(sums, counts_of_sums, strict=True)),
            square=found[end],
            signals=found[end + 1 :],
        )

    def _on_device(self, numbers: Sequence[float]) -> Tensor:
        """Return float64 [numbers] without waiting for the device."""
        device = self.grid.device
        own = torch.tensor(
            list(map(float, numbers)), dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        return own.to(device, non_blocking=True)

    def parameters(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (chunk, name, local tensor) of every parameter of this rank, including tied copies."""
        for module, infos in zip(self.chunks, self.infos, strict=True):
            for info in infos:
                yield info.chunk, info.name, module.get_parameter(info.name).detach()

    def differing(self) -> list[Differs]:
        """Return the parameters that differ between data-parallel ranks, where they should be equal. Collective."""
        self.finish()
        infos = (info for of_chunk in self.infos for info in of_chunk)
        tensors = (tensor for _, _, tensor in self.parameters())
        return differing(zip(infos, tensors, strict=True), self.grid)

    def state(self) -> dict[str, Any]:
        """Return the state that is not per parameter: plain numbers, equal on all ranks."""
        optimizer = {} if self.optimizer is None else self.optimizer.state()
        return {"step": self.step, "optimizer": optimizer, "scaler": self.scaler.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that state() returned."""
        self.step = int(state["step"])
        self.scaler.load_state(state["scaler"])
        if self.optimizer is not None:
            self.optimizer.load_state(state["optimizer"])

    def finish(self) -> None:
        """Wait for all communication. Call it before parameters are read (a save) and before exit."""
        if self.optimizer is not None:
            self.optimizer.wait()
