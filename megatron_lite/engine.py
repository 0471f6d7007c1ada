"""One rank's part of a model in training: its chunks, gradients and optimizer, and the training step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megaconv.planning.pipeline_order import Action, order
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.models.moe.balance import Balance, Step, mean_losses
from megatron_lite.models.passes import Pass, Passes
from megatron_lite.optimizer.algorithm import Rates, TensorGroups
from megatron_lite.optimizer.algorithms import make_dealer
from megatron_lite.optimizer.chunk_buckets import BucketOptions, ChunkBuckets
from megatron_lite.optimizer.clip import clip_factor, squares, sum_shares
from megatron_lite.optimizer.precision import LossScaler
from megatron_lite.optimizer.qk_clip import RowFactors, ScoreWatch, StepScores
from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.optimizer.zero import Optimizer
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.pipeline_order import last_backward
from megatron_lite.parallel.replicas import Differs, differing
from megatron_lite.products.fp8 import end_step
from megatron_lite.products.selection import autocast_of, delayed_products
from megatron_lite.rank.chunks import allocate_untrained, build_chunks
from megatron_lite.rank.computation import RankComputation
from megatron_lite.rank.expert_biases import move_expert_biases
from megatron_lite.rank.groups import context_group, groups_of_other_tokens, raise_to_largest
from megatron_lite.rank.loss_sums import LossSum
from megatron_lite.rank.report import StepReport
from megatron_lite.rank.totals import sum_over_world
from megatron_lite.settings.options import LossScale, ModelOptions, OptimizerOptions


class Engine(RankComputation):
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
        *,
        allocates: bool = True,
    ) -> None:
        """Build the chunks. optimizer: None for evaluation only. criterion: the loss.

        allocates: False for parameters without memory, which are read when they are used (megatron_lite/forward).
        Raises NotExpressible if the model can't be trained, LayoutError if it can't be sharded.
        """
        self.config = config
        self.grid = grid
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.step = 0
        """Calls of train_step so far; part of the seed of dropout. Set it when a run resumes."""
        self._balances: list[Balance] = []
        """The balances of the last step's microbatches."""
        self._balanced = Step()
        criterion.check(config)
        self.criterion = criterion.on(grid.group("replicas"))
        self._loss_names = criterion.loss_names(config)
        self._context = context_group(grid, options)
        ahead = config.mtp_layers if criterion.trains_mtp else 0
        self._passes = Passes(config, grid.device, self.dtype, self._context, ahead)
        trains_mtp, trains_head = criterion.trains_mtp, criterion.trains_head
        built = build_chunks(config, grid, options, trains_mtp=trains_mtp, trains_head=trains_head)
        self.chunks = built.chunks
        self.infos = built.infos
        self.adapters = built.adapters
        """The adapters of each chunk if only adapters are trained; empty lists if not."""
        self.trained = [
            [info for info in (*adapters, *infos) if info.trained]
            for infos, adapters in zip(built.infos, built.adapters, strict=True)
        ]
        """The parameters of each chunk that have gradients, in the order of a forward pass."""
        self._sizes = built.sizes
        self._autocast = autocast_of(self.chunks, options.fp8, grid.group("replicas"))
        self._delayed = [product for chunk in self.chunks for _, product in delayed_products(chunk)]
        self.buckets: list[ChunkBuckets] = []
        self.optimizer: Optimizer | None = None
        self._watch: ScoreWatch | None = None
        self.scaler = LossScaler(_loss_scale(optimizer, self.dtype))
        self.shards_parameters = _shards_parameters(optimizer, grid)
        if allocates:
            allocate_untrained(
                built,
                self.dtype,
                grid.device,
                evaluates=optimizer is None,
                frozen=not self.shards_parameters,
            )
        if optimizer is not None:
            self._prepare_training(optimizer)

    def _prepare_training(self, optimizer: OptimizerOptions) -> None:
        """Make the buckets, which hold the trained parameters, and the optimizer."""
        grid = self.grid
        options = BucketOptions(
            dtype=self.dtype,
            device=grid.device,
            groups=grid.group,
            bucket_elements=optimizer.bucket_elements,
            distributed=optimizer.distributed,
            overlap=optimizer.overlap_grad_reduce,
            optimizer=optimizer,
            dealer=make_dealer(optimizer),
            shards_gradients=optimizer.shards_gradients and comm.size(grid.group("replicas")) > 1,
            shards_parameters=self.shards_parameters,
            fetches_ahead=optimizer.overlap_param_gather,
            fuses_accumulation=optimizer.fuses_accumulation,
            sums_last=self.options.recompute.granularity != "full",
        )
        for module, infos, trained in zip(self.chunks, self.infos, self.trained, strict=True):
            frozen = [info for info in infos if info.frozen and self.shards_parameters]
            buckets = ChunkBuckets(module, trained, options, frozen)
            buckets.wait_before(list(module.units()), list(module.shared()))
            self.buckets.append(buckets)
        groups = TensorGroups(grid.group("tp"), grid.group("etp"))
        self.optimizer = Optimizer(self.buckets, optimizer, groups)
        if optimizer.qk_clip is not None or optimizer.log_scores:
            self._watch = ScoreWatch(self.chunks, grid, trains_mtp=self.criterion.trains_mtp)

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
        grid = self.grid
        optimizer = self.optimizer
        assert optimizer is not None, "the engine was made for evaluation"
        # The mean is first taken over all positions. `factor` below corrects it for labels that don't count.
        positions = grid.dp * sum(map(self.criterion.counts, microbatches))
        scale = self.scaler.scale
        losses = LossSum(self._loss_names, grid.device, scale / positions)
        self._begin_step()
        microbatches = self._with_extras(microbatches, drops=True)
        self._pass_forward_and_back(microbatches, losses)
        square = self._reduce_gradients(optimizer)
        scores = None if self._watch is None else self._watch.found()
        totals = sum_over_world(losses, square, signals, grid)
        # Here the host has waited for all of the device's work. After the update it would wait for the update too.
        largest_score = None if scores is None else float(scores.top)
        loss, tokens = totals.losses[0]
        norm, skipped = 0.0, True
        if tokens:
            # Correct the mean for labels that don't count, and remove the loss scale.
            factor = positions / tokens / scale
            norm = sqrt(totals.square) * factor if isfinite(totals.square) else float("inf")
            skipped = not isfinite(norm)
            self._update(norm, factor, Rates(lr, weight_decay, decoupled_lr), scores)
        end_step(self._delayed, grid.device, partial(raise_to_largest, grid=grid))
        self.step += 1
        return StepReport(
            loss=loss / (tokens or 1.0),
            tokens=tokens,
            grad_norm=norm,
            skipped=skipped,
            loss_scale=scale,
            signals=tuple(totals.signals),
            others=totals.means_of_others(self._loss_names),
            largest_score=largest_score,
        )

    def _update(self, norm: float, factor: float, rates: Rates, scores: StepScores | None) -> None:
        """Update the parameters, or only the loss scale and the expert biases if the gradients are not finite.

        norm: the norm of the gradients. factor: multiplies the gradients in the buckets before they are clipped.
        """
        assert self.optimizer is not None
        overflow = not isfinite(norm)
        self.scaler.update(overflow=overflow)
        self._move_expert_biases()
        if not overflow:
            factor *= clip_factor(norm, self.optimizer.options.clip_grad)
            self.optimizer.step(rates, factor, self._row_factors(scores))

    def _begin_step(self) -> None:
        for buckets in self.buckets:
            buckets.begin()
        self._balances.clear()
        self._balanced = Step(groups_of_other_tokens(self.grid))
        for product in self._delayed:
            product.begin_step()
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

    def _move_expert_biases(self) -> None:
        """Update the routers' expert biases from the tokens of all ranks of the stage.

        As in Megatron, the update also happens in a step that fp16 skips.
        """
        options = self.options
        if not self.config.experts.router_bias or not options.balance.bias_rate:
            return
        if options.lora is not None:
            return
        move_expert_biases(self.chunks, self._balances, groups_of_other_tokens(self.grid))

    def balancing_losses(self) -> dict[str, dict[int, float]]:
        """Return the balancing losses of the last step by name and layer, before coefficients.

        A value is the share of this rank's tokens in the loss, averaged over this rank's microbatches.
        """
        return mean_losses(self._balances)

    def _pass_of(self, batch: Microbatch, share: float, *, drops: bool) -> Pass:
        if not torch.is_grad_enabled():
            return super()._pass_of(batch, share, drops=drops)
        counting = share * self.criterion.counts(batch)
        balance = Balance(counting, self._balanced, self.grid.group("cp"))
        self._balances.append(balance)
        scores = None if self._watch is None else self._watch.of_pass()
        seed = self._seed(batch)
        return self._passes.make(batch, share=share, seed=seed, balance=balance, scores=scores)

    def differing(self) -> list[Differs]:
        """Return the parameters that differ between data-parallel ranks, where they should be equal. Collective."""
        self.finish()
        if self.shards_parameters:
            # No rank holds what another one holds.
            return []
        infos = chain.from_iterable(self.infos)
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

    def resting_ranges(self) -> Iterator[FlatRange]:
        """Yield the parameters that rest though all others are trained, each as a whole, with the state for a checkpoint.

        The state is in main memory: masters equal the parameters, and all else is zero. Collective if parameters are sharded.
        """
        infos = list(chain.from_iterable(self.infos))
        rests = self.options.lora is None and any(info.rests for info in infos)
        if self.optimizer is None or not rests:
            return
        for info, (_, _, tensor) in zip(infos, self.parameters(), strict=True):
            if info.rests:
                yield self.optimizer.resting(info, self.lasting(tensor))

    def finish(self) -> None:
        """Wait for all communication. Call it before parameters are read (a save) and before exit."""
        if self.optimizer is not None:
            self.optimizer.wait()


def _loss_scale(optimizer: OptimizerOptions | None, dtype: torch.dtype) -> LossScale | None:
    """Return the options of the loss scale, which only float16 needs."""
    return None if optimizer is None or dtype != torch.float16 else optimizer.loss_scale


def _shards_parameters(optimizer: OptimizerOptions | None, grid: Grid) -> bool:
    """Return whether each replica holds only a part of the parameters."""
    has_replicas = comm.size(grid.group("replicas")) > 1
    return has_replicas and optimizer is not None and optimizer.shards_parameters
