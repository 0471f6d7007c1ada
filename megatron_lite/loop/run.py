"""A run: the objects that a rank needs to train, and the progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.batches import GlobalBatches
from megatron_lite.data.finetuning.image_dataset import read_at_once
from megatron_lite.data.samples import Dataset
from megatron_lite.data.stored import FETCHED_AT_ONCE, reads_store
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.loop.log import Meter, Sink
from megatron_lite.loop.schedule import Schedule
from megatron_lite.loop.stop import Stop
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Exam
from megatron_lite.processes.launch import Place
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.sizes import Sizes


@dataclass
class Run:
    """The objects that a rank needs to train, and the progress."""

    settings: Settings
    config: ModelConfig
    sizes: Sizes
    dropouts: Mapping[str, float]
    place: Place
    objective: Objective
    engine: Engine
    feeder: Feeder
    datasets: list[Dataset | None]
    """For training, evaluation and test."""
    tokenizer: Tokenizer
    schedule: Schedule
    meter: Meter
    saver: Saver | None
    sinks: list[Sink]
    stop: Stop
    progress: Progress = field(default_factory=Progress)
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    """Number of steps whose gradients weren't finite."""
    empty: int = 0
    """Number of steps without a label that counts. Such a step changes no parameter."""
    interval: list[StepReport] = field(default_factory=list)
    """Steps since the last log line, without skipped ones. A step without a label changed no parameter."""
    saved: int | None = None
    """The iteration of the last save."""
    exam: Exam | None = None
    """The measurement after each epoch, if the data has one."""
    examined: int | None = None
    """The iteration of the last measurement."""
    base_samples: Mapping[str, str] = field(default_factory=dict)
    """Samples of the weights of the base of adapters (checkpoint/base_samples.py)."""

    def say(self, text: str) -> None:
        """Print on rank 0."""
        self.place.say(text)

    @property
    def scheduled(self) -> int:
        """Samples that determine learning rate and weight decay.

        If the run's length is in iterations, all iterations count with the current batch size. So schedules continue at
        the same place after a change of the batch size.
        """
        progress = self.progress
        if self.settings.training.train_samples is not None:
            return progress.scheduled_samples
        skipped = progress.consumed_samples - progress.scheduled_samples
        return max(0, progress.iteration * self.sizes.batch.full - skipped)

    @property
    def vocab(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocab_size

    def batches(self, dataset: Dataset) -> GlobalBatches:
        """Return this rank's batches of a dataset."""
        grid, tokens = self.engine.grid, self.objective.tokens
        threads = threads_for(dataset, self.settings.data)
        return GlobalBatches(
            dataset, self.sizes.micro_batch, grid.dp_rank, grid.dp, self.vocab, tokens, threads
        )


def threads_for(dataset: Dataset, data: Data) -> int:
    """Return the number of samples that a rank reads at the same time."""
    if reads_store(data):
        return FETCHED_AT_ONCE
    return read_at_once(dataset)
