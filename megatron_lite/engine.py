"""One rank's share of a model in training: its chunks, gradients and optimizer, and what one step does with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megaconv.config import ModelConfig
from megatron_lite.batch import Microbatch
from megatron_lite.grid import Grid
from megatron_lite.options import ModelOptions, OptimizerOptions
from megatron_lite.zero import Optimizer


@dataclass(frozen=True)
class StepReport:
    """The same on every rank."""

    loss: float
    """Mean over all tokens of the step that count."""
    tokens: float
    """How many those were (the sum of the loss mask)."""
    grad_norm: float
    """Before clipping; not finite if any gradient wasn't."""
    skipped: bool
    """Whether gradients weren't finite, so that nothing was changed."""
    loss_scale: float
    signals: tuple[float, ...]
    """The sums over all ranks of what was passed in."""


class Engine:
    """Built on every rank of a grid from the same configuration; holds no weights worth anything until they are loaded."""

    config: ModelConfig
    grid: Grid
    options: ModelOptions
    chunks: list[nn.Module]
    """Virtual stages, in order; parameters have Megatron core's names, layers counted from 0 in each chunk."""
    optimizer: Optimizer | None

    def __init__(
        self, config: ModelConfig, grid: Grid, options: ModelOptions, optimizer: OptimizerOptions | None
    ) -> None:
        """optimizer None: for evaluation alone. Raises NotExpressible for a model that can't be run (yet)."""
        raise NotImplementedError

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        lr: float,
        weight_decay: float = 0.0,
        signals: Sequence[float] = (),
    ) -> StepReport:
        """Forward, backward, reduce, clip, update. microbatches: this data-parallel rank's, all of the same shape.

        signals: any numbers, summed over all ranks in passing (a request to stop, say).
        """
        raise NotImplementedError

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, float]:
        """(sum of losses, tokens that count), over all data-parallel ranks; the same on every rank."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[int, str, Tensor]]:
        """(chunk, name, local tensor) of every parameter of this rank; a tied copy is listed too."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for all communication; before reading parameters (a save) and before exit."""
        raise NotImplementedError
