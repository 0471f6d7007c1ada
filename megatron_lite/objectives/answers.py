"""Tasks of Megatron-LM: a BERT learns to classify pairs of sentences, or to choose among several answers.

A run goes through its files in epochs, and measures after each epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.batches import Batch
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tasks.dataset import TaskDataset, epoch_samples, in_order, shuffled
from megatron_lite.data.tasks.examples import Example, Read, Task
from megatron_lite.data.tasks.glue import MNLI, QQP
from megatron_lite.data.tasks.race import RACE
from megatron_lite.data.tasks.samples import Sequences
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.objectives.answer_head import with_head
from megatron_lite.objectives.answer_loss import ANSWERS, COUNTING, AnswerLoss
from megatron_lite.objectives.epochs import require_same_batch
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Exam, Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

TASKS: Mapping[str, Task] = {task.name: task for task in (MNLI, QQP, RACE)}
SHOWN = 3
"""Number of lines that a warning lists."""


class Answers(Objective):
    """The right answer of each example of a task."""

    tokens: ClassVar = ("text",)
    perplexity: ClassVar = False

    def __init__(self, task: Task) -> None:
        self.task, self.rows = task, task.rows

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Answers | None":
        name = settings.tasks.task
        return None if name is None or name not in TASKS else cls(TASKS[name])

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        """Return the start with a head for the task. Raises UsageError for a checkpoint that is no BERT."""
        name = self.task.name
        if not finetune:
            raise UsageError(
                f"--task {name} starts from a trained BERT: it requires the command finetune"
            )
        if start is None:
            return None
        if start.config.family != "bert":
            raise UsageError(
                f"--task {name} is for a BERT; the checkpoint is a {start.config.family}"
            )
        return with_head(
            start, self.task, settings.model.init_method_std, settings.training.seed, say
        )

    def extra_ids(self, settings: Settings) -> int | None:
        return 0

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the files. Raises UsageError for missing files, CorruptCheckpoint with file and line for bad content."""
        asked = settings.tasks
        return AnswerData(
            self.task,
            _read(self.task, asked.train_data or ()),
            _read(self.task, asked.valid_data or ()),
        )

    def criterion(self, settings: Settings) -> Criterion:
        return AnswerLoss()

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return the choices of an example as consecutive rows."""
        length = batch["text"].shape[-1]
        text, types, mask = (
            batch[name].reshape(-1, length) for name in ("text", "types", "padding_mask")
        )
        extras = {ANSWERS: batch["label"], COUNTING: batch["counts"].float()}
        # The type of padding may be no valid type, so it is set to 0.
        return Microbatch(text, text, types=types * mask, visible=mask.bool(), extras=extras)


@dataclass(frozen=True)
class AnswerData(TrainingData):
    """The examples of a task, read from its files."""

    task: Task
    train: Mapping[str, Read]
    valid: Mapping[str, Read]
    """By file or directory."""

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "AnswerData"]:
        """See TrainingData.fitted. It converts --epochs to steps. Evaluations at intervals happen only if a flag requests them.

        Raises UsageError also if a continued run has another batch size: an epoch is whole batches, in an order that
        depends on it.
        """
        training, batch = settings.training, sizes.batch.full
        require_same_batch(batch, progress)
        epochs, examples = training.epochs or 0, _examples(self.train)
        each = self._epoch_samples(settings, sizes)
        if epochs and not each:
            number = counted(len(examples), "example")
            raise UsageError(
                f"--train-data has {number}, fewer than a batch of {batch}; --keep-last-batch makes one of them"
            )
        steps = each // batch
        measured = counted(len(_examples(self.valid)), "example")
        say(
            f"{self.task.name}: {counted(len(examples), 'example')}, {counted(steps, 'step')} an epoch, {measured} to measure"
        )
        for path, read in {**self.train, **self.valid}.items():
            if read.left_out:
                say(_left_out(path, read.left_out))
        eval_iters = training.eval_iters if "eval_iters" in settings.given else 0
        training = replace(training, train_iters=epochs * steps, eval_iters=eval_iters)
        return replace(settings, training=training), self

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        sequences, training = self._sequences(setup), setup.settings.training
        examples, valid = _examples(self.train), _examples(self.valid)
        order = shuffled(
            len(examples),
            setup.sizes.batch.full,
            training.epochs or 0,
            training.seed,
            keep_last=setup.settings.tasks.keep_last_batch,
        )
        again = np.resize(np.arange(len(valid)), samples[1])
        return [
            TaskDataset(examples, sequences, order),
            TaskDataset(valid, sequences, again) if len(again) else None,
            None,
        ]

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity. It is a hash of the texts, which the tokenizer doesn't change."""
        return cache_key(examples=[list(example) for example in _examples(self.train)])

    def exam(self, setup: Setup) -> Exam:
        """Return the measurement after each epoch: every example of each file once."""
        sequences, batch = self._sequences(setup), setup.sizes.batch.full
        empty = np.empty(0, np.int64)
        datasets = {
            path: in_order(TaskDataset(read.examples, sequences, empty), batch)
            for path, read in self.valid.items()
        }
        return Exam(self._epoch_samples(setup.settings, setup.sizes), datasets)

    def _epoch_samples(self, settings: Settings, sizes: Sizes) -> int:
        count = len(_examples(self.train))
        return epoch_samples(count, sizes.batch.full, keep_last=settings.tasks.keep_last_batch)

    def _sequences(self, setup: Setup) -> Sequences:
        tokenizer = setup.tokenizer
        words = vocabulary(
            tokenizer, ("cls", "sep", "pad"), "texts of a task need the tokenizer of the BERT"
        )
        return Sequences(
            self.task, tokenizer.tokenize, words.cls, words.sep, words.pad, setup.sizes.seq
        )


def _read(task: Task, paths: tuple[str, ...]) -> dict[str, Read]:
    found = {path: task.read(path) for path in paths}
    for path, read in found.items():
        if not read.examples:
            raise UsageError(f"{path}: has no example of {task.name}")
    return found


def _examples(files: Mapping[str, Read]) -> list[Example]:
    return [example for read in files.values() for example in read.examples]


def _left_out(path: str, left_out: Sequence[str]) -> str:
    more = ", ..." if len(left_out) > SHOWN else ""
    lines = ", ".join(left_out[:SHOWN])
    return (
        f"warning: {path}: {counted(len(left_out), 'line')} left out, as by Megatron: {lines}{more}"
    )
