"""What a run on a task has besides: its files, its epochs, and what is measured after each; all said aloud."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tasks.dataset import TaskDataset, epoch_samples, in_order, shuffled
from megatron_lite.data.tasks.examples import Example, Read, Task
from megatron_lite.data.tasks.glue import MNLI, QQP
from megatron_lite.data.tasks.race import RACE
from megatron_lite.data.tasks.samples import Sequences
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes
from megatron_lite.settings.wording import counted

TASKS: Mapping[str, Task] = {task.name: task for task in (MNLI, QQP, RACE)}
SHOWN = 3
"""Lines that are named one by one."""

Say = Callable[[str], None]


def task_of(settings: Settings, config: ModelConfig | None, *, finetune: bool) -> Task | None:
    """config: of the checkpoint that the run starts from. Raises UsageError for a task that can't be, and for a model made for one."""
    name = settings.tasks.task
    if name is None:
        if config is not None and config.has("pooler !binary_head"):
            raise UsageError(
                "the checkpoint is a model for a task, without a head for words; give --task and its files"
            )
        return None
    if not finetune:
        raise UsageError(f"--task {name} starts from a trained BERT: it goes with the command finetune")
    if config is not None and config.family != "bert":
        raise UsageError(f"--task {name} is for a BERT; the checkpoint is a {config.family}")
    return TASKS[name]


@dataclass(frozen=True)
class Exam:
    """What is measured after each epoch."""

    epoch_samples: int
    datasets: Mapping[str, Dataset]
    """By the file or directory that they were read from."""


@dataclass(frozen=True)
class TaskData:
    """The files of a task, read."""

    task: Task
    train: Mapping[str, Read]
    valid: Mapping[str, Read]
    """By file or directory."""

    def with_epochs(self, settings: Settings, sizes: Sizes, say: Say) -> Settings:
        """--epochs as steps. Evaluations at intervals are made only where they are asked for. Raises UsageError."""
        epochs, batch = settings.training.epochs or 0, sizes.batch.full
        examples, measured = _examples(self.train), _examples(self.valid)
        each = epoch_samples(len(examples), batch, keep_last=settings.tasks.keep_last_batch)
        if epochs and not each:
            raise UsageError(
                f"--train-data has {counted(len(examples), 'example')}, fewer than a batch of {batch}; --keep-last-batch makes one of them"
            )
        iters = settings.training.eval_iters if "eval_iters" in settings.given else 0
        say(
            f"{self.task.name}: {counted(len(examples), 'example')}, {counted(each // batch, 'step')} an epoch, "
            f"{counted(len(measured), 'example')} to measure"
        )
        for path, read in {**self.train, **self.valid}.items():
            if read.left_out:
                more = ", ..." if len(read.left_out) > SHOWN else ""
                lines = ", ".join(read.left_out[:SHOWN])
                say(f"warning: {path}: {counted(len(read.left_out), 'line')} left out, as by Megatron: {lines}{more}")
        return replace(
            settings, training=replace(settings.training, train_iters=epochs * each // batch, eval_iters=iters)
        )

    def datasets(
        self, settings: Settings, tokenizer: Tokenizer, sizes: Sizes, samples: list[int]
    ) -> list[Dataset | None]:
        """For training, evaluation, test. samples: as make_datasets takes them. Raises UsageError."""
        sequences, training = self._sequences(tokenizer, sizes), settings.training
        examples, valid = _examples(self.train), _examples(self.valid)
        order = shuffled(
            len(examples),
            sizes.batch.full,
            training.epochs or 0,
            training.seed,
            keep_last=settings.tasks.keep_last_batch,
        )
        again = np.resize(np.arange(len(valid)), samples[1])
        return [
            TaskDataset(examples, sequences, order),
            TaskDataset(valid, sequences, again) if len(again) else None,
            None,
        ]

    def exam(self, settings: Settings, tokenizer: Tokenizer, sizes: Sizes) -> Exam:
        sequences, batch = self._sequences(tokenizer, sizes), sizes.batch.full
        empty = np.empty(0, np.int64)
        datasets = {
            path: in_order(TaskDataset(read.examples, sequences, empty), batch) for path, read in self.valid.items()
        }
        each = epoch_samples(len(_examples(self.train)), batch, keep_last=settings.tasks.keep_last_batch)
        return Exam(each, datasets)

    def _sequences(self, tokenizer: Tokenizer, sizes: Sizes) -> Sequences:
        words = vocabulary(tokenizer, ("cls", "sep", "pad"), "texts of a task need the tokenizer of the BERT")
        return Sequences(self.task, tokenizer.tokenize, words.cls, words.sep, words.pad, sizes.seq)


def read_task(settings: Settings, task: Task) -> TaskData:
    """Raises UsageError for files that are missing, CorruptCheckpoint, naming file and line, for what is wrong in them."""
    asked = settings.tasks
    return TaskData(task, _read(task, asked.train_data or ()), _read(task, asked.valid_data or ()))


def _read(task: Task, paths: tuple[str, ...]) -> dict[str, Read]:
    found = {path: task.read(path) for path in paths}
    for path, read in found.items():
        if not read.examples:
            raise UsageError(f"{path}: has no example of {task.name}")
    return found


def _examples(files: Mapping[str, Read]) -> list[Example]:
    return [example for read in files.values() for example in read.examples]
