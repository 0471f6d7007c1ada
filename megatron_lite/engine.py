"""One rank's share of a model in training: its chunks, gradients and optimizer, and what one step does with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megatron_lite.models import rng
from megatron_lite.models.batch import Lengths, Microbatch
from megatron_lite.models.cache import Cache
from megatron_lite.models.fp8 import check_device, delayed_products
from megatron_lite.models.lora.attached import attach, check_targets
from megatron_lite.models.moe.balance import Balance, Step, mean_losses, tokens_by_layer
from megatron_lite.models.moe.router import Router
from megatron_lite.models.network import Network
from megatron_lite.models.networks import network
from megatron_lite.models.passes import Pass, Passes
from megatron_lite.models.plan import ExpertRanks, make_plan
from megatron_lite.models.preference import LOSSES
from megatron_lite.models.qk_clip import ScoreWatch
from megatron_lite.models.totals import LossSum, RowSums, places
from megatron_lite.parallel import comm
from megatron_lite.parallel.buckets import ChunkBuckets
from megatron_lite.parallel.clip import clip_factor, squares, sum_shares
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.dealing import Dealer
from megatron_lite.parallel.fp8 import end_step
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.kinds import Kind, declared
from megatron_lite.parallel.parameters import ParameterInfo, adapter_info, parameter_infos, replace_parameter
from megatron_lite.parallel.payload import Payload, Wires, with_gradient
from megatron_lite.parallel.pipeline import Action, Executor, forward_order, last_backward, order
from megatron_lite.parallel.precision import LossScaler
from megatron_lite.parallel.replicas import Differs, differing
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.parallel.zero import Optimizer
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

SEE_OTHER_TOKENS = ("tp", "replicas")
"""Axes of the grid along which routers of the same layer have other tokens: tensor ranks route their part of the sequence."""


@dataclass(frozen=True)
class StepReport:
    """The same on every rank."""

    loss: float
    """Mean over all tokens of the step that count, or over all pairs of answers."""
    tokens: float
    """How many those were (the sum of the loss mask, or the pairs)."""
    grad_norm: float
    """Before clipping; not finite if any gradient wasn't."""
    skipped: bool
    """Whether gradients weren't finite, or there were none, so that nothing was changed."""
    loss_scale: float
    """The one that was used."""
    signals: tuple[float, ...]
    """The sums over all ranks of what was passed in."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Means of what else the model learns from, by name."""
    largest_score: float | None = None
    """Of attention, before any clip; None where nobody asked for it."""

    @property
    def empty(self) -> bool:
        """Whether no label of the step counts."""
        return not self.tokens


class Engine:
    """Built on every rank of a grid from the same configuration. Parameters are zeros until they are loaded."""

    def __init__(
        self, config: ModelConfig, grid: Grid, options: ModelOptions, optimizer: OptimizerOptions | None
    ) -> None:
        """optimizer None: for evaluation alone.

        Raises NotExpressible for a model that can't be trained, LayoutError for one that can't be sharded.
        """
        self.config, self.grid, self.options = config, grid, options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.step = 0
        """Calls of train_step so far; part of dropout's seed. Set it when a run is resumed."""
        self._balances: list[Balance] = []
        """Of the last step's microbatches."""
        self._balanced = Step()
        tp = grid.layout.tp
        check_device(options.fp8, grid.device, tp)
        ranks = TensorGroup(grid.group("tp"), grid.tp_rank, tp, options.sequence_parallel and tp > 1)
        plan = make_plan(config, grid.layout, options, ranks, ExpertRanks(grid.group("ep"), grid.group("etp")))
        kind = network(config.family)
        self._loss_names = kind.loss_names(config) if options.preference is None else LOSSES
        self._context = self._context_group()
        self._passes = Passes(config, grid.device, self.dtype, self._context)
        self.chunks: list[Network] = []
        """Virtual stages, in order; parameters have Megatron core's names, layers counted from 0 in each chunk."""
        self.infos: list[list[ParameterInfo]] = []
        """Of each chunk."""
        self.adapters: list[list[ParameterInfo]] = []
        """Of each chunk, where adapters are trained and nothing else; else empty."""
        for index, chunk in enumerate(grid.chunks()):
            with torch.device("meta"):
                module = kind(plan, chunk)
            self.chunks.append(module)
            kinds = declared(module)
            infos = list(
                parameter_infos(
                    kinds,
                    config,
                    grid,
                    index,
                    chunk,
                    plan.vocab_rows,
                    sequence=ranks.sequence,
                    frozen=options.lora is not None,
                )
            )
            self.infos.append(infos)
            self.adapters.append([])
            if options.lora is not None:
                natives = [info.native for info in infos]
                with torch.device("meta"):
                    made = list(attach(module, natives, config, options.lora, ranks))
                self.adapters[-1] = [adapter_info(index, *each, tp, sequence=ranks.sequence) for each in made]
        if options.lora is not None:
            check_targets(config, options.lora.targets, found=any(self.adapters))
        self._delayed = [product for chunk in self.chunks for _, product in delayed_products(chunk)]
        self.buckets: list[ChunkBuckets] = []
        self.optimizer: Optimizer | None = None
        self._watch: ScoreWatch | None = None
        fp16_scale = optimizer.loss_scale if optimizer is not None and self.dtype == torch.float16 else None
        self.scaler = LossScaler(fp16_scale)
        for module, of_chunk, adapters in zip(self.chunks, self.infos, self.adapters, strict=True):
            for info in (*of_chunk, *adapters):
                if optimizer is None or not info.trained:
                    dtype = torch.float32 if info.kind is Kind.UNTRAINED else self.dtype
                    zeros = torch.zeros(info.native.shape, dtype=dtype, device=grid.device)
                    replace_parameter(module, info.name, nn.Parameter(zeros, requires_grad=False))
        if optimizer is not None:
            self._prepare_training(optimizer)

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
        grid, dealer = self.grid, Dealer() if optimizer.distributed and optimizer.kind == "muon" else None
        for module, infos, adapters in zip(self.chunks, self.infos, self.adapters, strict=True):
            buckets = ChunkBuckets(
                module, [info for info in (*infos, *adapters) if info.trained], self.dtype, grid.device, grid.group,
                bucket_elements=optimizer.bucket_elements,
                distributed=optimizer.distributed,
                sent_as=torch.bfloat16 if optimizer.bf16_reduce else torch.float32,
                overlap=optimizer.overlap_grad_reduce,
                dealer=dealer,
            )  # fmt: skip
            buckets.wait_before(module.units())
            self.buckets.append(buckets)
        self.optimizer = Optimizer(self.buckets, optimizer, grid.group("tp"), grid.group("etp"))
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
        """Forward, backward, reduce, clip, update. microbatches: this data-parallel rank's, all of the same shape.

        signals: any numbers, summed over all ranks in passing (a request to stop, say). decoupled_lr: of embedding and head.
        """
        optimizer, layout = self.optimizer, self.grid.layout
        assert optimizer is not None, "the engine was made for evaluation"
        for buckets in self.buckets:
            buckets.begin()
        # The share of each in the mean, as if all of them counted; what doesn't count is made up for below.
        positions = self.grid.dp * sum(map(places, microbatches))
        scale = self.scaler.scale
        losses = LossSum(self._loss_names, self.grid.device, scale / positions)
        self._balances.clear()
        if self._watch is not None:
            self._watch.begin()
        self._balanced = Step([self.grid.group(axis) for axis in SEE_OTHER_TOKENS])
        actions = order(layout.pp, layout.vpp, len(microbatches), self.grid.pp_rank)
        completing = last_backward(actions)

        def before_backward(action: Action) -> None:
            self.buckets[action.chunk].is_last_pass = action in completing

        self._run(actions, microbatches, losses, before_backward)
        for buckets in self.buckets:
            buckets.finish()
        sum_shares(optimizer.ranges(), self.grid)
        square = squares(optimizer.ranges(), self.grid, distributed=optimizer.distributed)
        scores = None if self._watch is None else self._watch.found()
        (loss, *others), (square_sum, *summed) = self._sum_over_world(losses, square, signals)
        loss_sum, tokens = loss
        norm, factor = 0.0, 1.0
        if tokens:
            factor = positions / tokens / scale
            norm = sqrt(square_sum) * factor if isfinite(square_sum) else float("inf")
            self.scaler.update(overflow=not isfinite(norm))
            self._move_expert_biases()
        skipped = not tokens or not isfinite(norm)
        if not skipped:
            clip = optimizer.options.qk_clip
            rows = {} if scores is None or clip is None else scores.row_factors(clip)
            factor *= clip_factor(norm, optimizer.options.clip_grad)
            optimizer.step(lr, weight_decay, factor, rows, decoupled_lr)
        end_step(self._delayed, [self.grid.group(axis) for axis in SEE_OTHER_TOKENS])
        self.step += 1
        means = {
            name: total / (count or 1.0) for name, (total, count) in zip(self._loss_names[1:], others, strict=True)
        }
        return StepReport(
            loss_sum / (tokens or 1.0), tokens, norm, skipped, scale, tuple(summed), means,
            None if scores is None else float(scores.top),
        )  # fmt: skip

    def _move_expert_biases(self) -> None:
        """By the tokens of all ranks of the stage; as in Megatron also in a step that fp16 skips."""
        if not self.config.experts.router_bias or not self.options.balance.bias_rate or self.options.lora is not None:
            return
        modules = (module for chunk in self.chunks for module in chunk.modules())
        routers = [module for module in modules if isinstance(module, Router) and module.expert_bias is not None]
        if not routers:  # a stage may have dense layers alone
            return
        found = tokens_by_layer(self._balances)
        tokens = torch.stack([found[router.layer] for router in routers])
        for axis in SEE_OTHER_TOKENS:
            comm.all_reduce(tokens, self.grid.group(axis))
        for router, counts in zip(routers, tokens, strict=True):
            router.move_bias(counts)

    def balancing_losses(self) -> dict[str, dict[int, float]]:
        """Of the last step by name and layer, before coefficients: the mean over this rank's microbatches, its tokens' share."""
        return mean_losses(self._balances)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[str, tuple[float, float]]:
        """By the names of losses (sum, tokens or pairs that count), over all data-parallel ranks; the same on every rank."""
        layout = self.grid.layout
        losses = LossSum(self._loss_names, self.grid.device, 1.0)
        with torch.no_grad():
            self._run(forward_order(layout.pp, layout.vpp, len(microbatches)), microbatches, losses)
        found, _ = self._sum_over_world(losses, torch.zeros((), device=self.grid.device), ())
        return {name: (total, count) for name, (total, count) in zip(self._loss_names, found, strict=True)}

    def log_probs(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Of each row the sum over its labels that count: float64 [dp, microbatches, rows], everybody's on every rank. Collective.

        microbatches: this data-parallel rank's, as many on each, all of the same shape.
        """
        layout, rows, grid = self.grid.layout, RowSums(), self.grid
        with torch.no_grad():
            self._run(forward_order(layout.pp, layout.vpp, len(microbatches)), microbatches, rows)
        shape = grid.dp, len(microbatches), len(microbatches[0].tokens)
        sums = torch.zeros(shape, dtype=torch.float64, device=grid.device)
        if rows.found and not grid.tp_rank:
            sums[grid.dp_rank] = torch.stack(rows.found)
        comm.all_reduce(sums, grid.group("world"))
        return -sums

    def logits(self, batch: Microbatch, cache: Cache | None = None) -> Tensor | None:
        """float32 [batch, sequence, vocabulary] on the last stage, None on others. Collective. cache: see last_stage."""
        last = self.last_stage(batch, cache)
        if last is None:
            return None
        chunk, hidden = last
        with torch.no_grad():
            own = chunk.logits((hidden,))
        return own if self._context is None else self._context.whole(own, 1)

    def last_stage(self, batch: Microbatch, cache: Cache | None = None) -> tuple[Network, Tensor] | None:
        """(the last chunk, activations behind its final norm) on the last stage, None on others. Collective.

        cache: keys and values of the tokens before these, whose positions the batch then says; these are appended.
        """
        self.finish()  # the head is read without being called, so nothing else waits for it
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
            Executor(self.grid, forward, self._arriving(batch)).run(forward_order(layout.pp, layout.vpp, 1))
        return found[0] if found else None

    def _run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
        losses: LossSum | RowSums,
        before_backward: Any = lambda _: None,
    ) -> None:
        under_way: dict[int, Pass] = {}

        def forward(action: Action, taken: Payload) -> Payload:
            chunk, number = self.chunks[action.chunk], action.microbatch
            if number not in under_way:
                under_way[number] = self._training_pass(microbatches[number], losses.share)
            run = under_way.pop(number) if action.chunk == len(self.chunks) - 1 else under_way[number]
            given: Payload = chunk(taken, run)
            return (losses.add(*chunk.loss(given, run)),) if chunk.is_last else given

        Executor(self.grid, forward, self._arriving(microbatches[0])).run(actions, before_backward)

    def make_pass(self, batch: Microbatch, cache: Cache | None = None) -> Pass:
        """For chunks that are called one by one: without dropout, and without a part in a step."""
        return self._passes.make(batch, share=1.0, cache=cache)

    def _training_pass(self, batch: Microbatch, share: float) -> Pass:
        if not torch.is_grad_enabled():
            return self._passes.make(batch, share=share)
        lora = 0.0 if self.options.lora is None else self.options.lora.dropout
        drops = max(self.options.hidden_dropout, self.options.attention_dropout, lora) > 0
        seed = rng.Seed(self.options.seed, self.step, batch.index, context=self._context) if drops else None
        balance = Balance(share * places(batch), self._balanced, self.grid.group("cp"))
        self._balances.append(balance)
        scores = None if self._watch is None else self._watch.of_pass()
        return self._passes.make(batch, share=share, seed=seed, balance=balance, scores=scores)

    def _arriving(self, batch: Microbatch) -> Callable[[Action], Wires]:
        """What each action of microbatches of this shape gets from another stage."""
        rows, length = batch.tokens.shape
        lengths = Lengths(rows, length // self.grid.cp, 0 if batch.source is None else batch.source.shape[1])

        def wires(action: Action) -> Wires:
            chunk = self.chunks[action.chunk]
            return with_gradient(chunk.gives(lengths)) if action.backward else chunk.takes(lengths)

        return wires

    def _sum_over_world(
        self, losses: LossSum, square: Tensor, signals: Sequence[float]
    ) -> tuple[list[list[float]], list[float]]:
        """([sum, tokens] of each loss, [squares, *signals]) over all ranks: the one collective, and the one wait for a GPU, of a step."""
        counts = float(self.grid.tp_rank == 0)  # the others on the last stage have the same losses
        device, pairs = self.grid.device, losses.sums.numel()
        own = torch.tensor(list(map(float, signals)), dtype=torch.float64, pin_memory=device.type == "cuda")
        values = torch.cat(
            [losses.sums.flatten() * counts, square.to(torch.float64).view(1), own.to(device, non_blocking=True)]
        )
        comm.all_reduce(values, self.grid.group("world"))
        found = values.tolist()
        return [found[at : at + 2] for at in range(0, pairs, 2)], found[pairs:]

    def parameters(self) -> Iterator[tuple[int, str, Tensor]]:
        """(chunk, name, local tensor) of every parameter of this rank; a tied copy is listed too."""
        for module, infos in zip(self.chunks, self.infos, strict=True):
            for info in infos:
                yield info.chunk, info.name, module.get_parameter(info.name).detach()

    def differing(self) -> list[Differs]:
        """Parameters that data-parallel ranks should hold alike, and don't. Collective."""
        self.finish()
        infos = (info for of_chunk in self.infos for info in of_chunk)
        tensors = (tensor for _, _, tensor in self.parameters())
        return differing(zip(infos, tensors, strict=True), self.grid)

    def state(self) -> dict[str, Any]:
        """What isn't per parameter: plain numbers, equal on all ranks."""
        optimizer = {} if self.optimizer is None else self.optimizer.state()
        return {"step": self.step, "optimizer": optimizer, "scaler": self.scaler.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.scaler.load_state(state["scaler"])
        if self.optimizer is not None:
            self.optimizer.load_state(state["optimizer"])

    def finish(self) -> None:
        """Wait for all communication; before reading parameters (a save) and before exit."""
        if self.optimizer is not None:
            self.optimizer.wait()
