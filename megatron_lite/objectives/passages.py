"""Megatron's task RET-FINETUNE-NQ: a biencoder learns to find the passage that answers a question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from formats.wording import counted
from megaconv.errors import LayoutError, UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.batches import Batch
from megatron_lite.data.blocks.special import special_tokens
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tasks.dataset import epoch_samples, shuffled
from megatron_lite.data.tasks.passages import PassageDataset, Question, read_questions
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.retrieval_loss import RetrievalLoss, texts_of
from megatron_lite.objectives.blocks import prepared_towers
from megatron_lite.objectives.epochs import require_same_batch
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

NAME = "RET-FINETUNE-NQ"


class Passages(Objective):
    """Questions and passages in DPR's files."""

    tokens: ClassVar = ("query", "contexts")
    perplexity: ClassVar = False

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Passages | None":
        return cls() if settings.tasks.task == NAME else None

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        if not finetune:
            raise UsageError(f"--task {NAME} starts from a retriever: it requires finetune")
        return prepared_towers(start, settings, say)

    def extra_ids(self, settings: Settings) -> int | None:
        return 0

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the files. Raises UsageError, CorruptCheckpoint with the row for bad content."""
        asked = settings.tasks
        if asked.keep_last_batch:
            raise UsageError(f"--keep-last-batch: --task {NAME} has whole batches; leave it out")
        train = [each for path in asked.train_data or () for each in read_questions(path)]
        valid = [each for path in asked.valid_data or () for each in read_questions(path)]
        return PassageData(train, valid)

    def criterion(self, settings: Settings) -> Criterion:
        asked = settings.retrieval
        topk = asked.retriever_report_topk_accuracies or ()
        return RetrievalLoss(
            asked.retriever_score_scaling, topk, asked.retriever_negatives, reports_rank=True
        )

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return the questions with all positives first, and then all negatives in the order of the questions."""
        contexts, passages = batch["contexts"], batch["passages"].tolist()
        negatives = [
            contexts[number, 1:count] for number, count in enumerate(passages) if count > 1
        ]
        rows = torch.cat([contexts[:, 0], *negatives])
        return texts_of(batch["query"], rows)


@dataclass(frozen=True)
class PassageData(TrainingData):
    """The questions of the files."""

    train: Sequence[Question]
    valid: Sequence[Question]

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "PassageData"]:
        """See TrainingData.fitted. It converts --epochs to steps, and measures all of --valid-data after each epoch.

        Raises UsageError also if a continued run has another batch size.
        """
        if sizes.layout.pp > 1:
            raise LayoutError(
                f"pp = {sizes.layout.pp}: the passages of --task {NAME} differ in number between micro batches, which pipeline "
                "stages don't support; take tensor or data parallelism"
            )
        training, batch = settings.training, sizes.batch.full
        require_same_batch(batch, progress)
        epochs, steps = training.epochs or 0, len(self.train) // batch
        if epochs and not steps:
            raise UsageError(
                f"--train-data has {counted(len(self.train), 'question')}, fewer than a batch of {batch}"
            )
        measured = len(self.valid) // batch
        say(
            f"{NAME}: {counted(len(self.train), 'question')}, {counted(steps, 'step')} an epoch; evaluations compare the passages "
            f"of {counted(batch, 'question')}, on which ranks and accuracies depend"
        )
        changed = replace(
            training,
            train_iters=epochs * steps,
            eval_iters=measured,
            eval_interval=max(1, steps),
        )
        return replace(settings, training=changed), self

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        settings = setup.settings
        asked, training = settings.retrieval, settings.training
        batch = setup.sizes.batch.full
        each = epoch_samples(len(self.train), batch, keep_last=False)
        order = shuffled(
            len(self.train), batch, training.epochs or 0, training.seed, keep_last=False
        )
        special, tokenize = special_tokens(setup.tokenizer), setup.tokenizer.tokenize
        length = asked.retriever_seq_length
        hard = asked.train_hard_neg if asked.train_with_neg else 0
        train = PassageDataset(
            self.train, order, tokenize, special, length, hard, seed=training.seed
        )
        again = np.resize(np.arange(len(self.valid)), samples[1])
        valid = PassageDataset(
            self.valid,
            again,
            tokenize,
            special,
            length,
            asked.val_av_rank_hard_neg,
            asked.val_av_rank_other_neg,
            fills=False,
        )
        return [train if each else None, valid if len(again) else None, None]

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity. It is a hash of the texts, which the tokenizer doesn't change."""
        return cache_key(questions=[repr(question) for question in self.train])
