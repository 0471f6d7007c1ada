"""The data of a run, from the flags to the datasets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.processes.launch import Place
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """A run whose sizes are known."""

    settings: Settings
    config: ModelConfig
    tokenizer: Tokenizer
    sizes: Sizes
    place: Place
    teacher: Start | None = None
    """The teacher of a distillation."""

    def say(self, text: str) -> None:
        """Print on rank 0."""
        self.place.say(text)


@dataclass(frozen=True)
class Exam:
    """A measurement after each epoch."""

    epoch_samples: int
    datasets: Mapping[str, Dataset]
    """By the file or directory of the examples."""


class TrainingData(ABC):
    """The data of one run. Methods are in the order in which a run calls them."""

    @property
    def longest(self) -> int:
        """Tokens of the longest example, from which a default of --seq-length follows; 0: unknown."""
        return 0

    @property
    def tokens(self) -> int:
        """Tokens of all training examples, from which the default batch of --guide follows; 0: unknown."""
        return 0

    @property
    def reader(self) -> ImageReader | None:
        """The reader of the images; None if there are none."""
        return None

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "TrainingData"]:
        """Return (settings with the length of the run in steps, data fitted to the length of a sample).

        progress: of the continued run. say: receives a line for each value that no flag sets. Raises UsageError.
        """
        return settings, self

    @abstractmethod
    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        """Return the datasets for training, evaluation and test; None for a dataset without data.

        samples: the least number drawn from each. Raises UsageError, CorruptCheckpoint.
        """

    def identity(self, setup: Setup) -> str | None:
        """Return a hash of the training data, which changes with files and tokenizer; None: it isn't known."""
        return None

    def exam(self, setup: Setup) -> Exam | None:
        """Return the measurement after each epoch; None: there is none."""
        return None

    def introduction(self, setup: Setup, dataset: Dataset | None) -> Iterator[str]:
        """Yield log lines about the data. dataset: for training."""
        return iter(())
