"""KTO: learning from answers that are rated good or bad."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.moving import moved
from megatron_lite.objectives.compared import Compared
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.pair_loss import REFERENCE
from megatron_lite.objectives.rated_loss import DIVERGENCE, GOOD, RatedLoss, Rating
from megatron_lite.objectives.reference import with_reference
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.parallel import comm
from megatron_lite.settings.config import Settings


class RatedAnswers(Compared):
    """A sample is an answer with a rating. Its question with another answer only estimates the divergence."""

    data_words: ClassVar = " on rated answers"

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "RatedAnswers | None":
        return cls() if settings.kto.kto else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        check_sources(settings.data)
        return read_examples_of(settings, tokenizer, rated=True, images=image_reader(settings))

    def criterion(self, settings: Settings) -> Criterion:
        kto = settings.kto
        return RatedLoss(Rating(kto.kto_beta, kto.kto_desirable_weight, kto.kto_undesirable_weight))

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """See Objective.feeder. Questions may have images."""
        plain = super().feeder(engine, start, data, setup)
        completing = with_encoder(plain, engine, data.reader, setup)
        return RatedFeeder(**vars(plain), engine=engine, completing=completing)

    def load(
        self,
        engine: Engine,
        start: Start,
        datasets: Sequence[Dataset | None],
        feeder: Feeder,
        setup: Setup,
    ) -> list[Dataset | None]:
        """See Objective.load. The reference's log-probabilities of both rows become part of the datasets."""
        return with_reference(engine, start, datasets, feeder, setup)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return both rows of each sample, one after the other. Padding is at their ends."""
        length = batch["tokens"].shape[-1]
        tokens, labels, counting = (
            batch[name].view(-1, length) for name in ("tokens", "labels", "loss_mask")
        )
        return Microbatch(tokens, labels, counting)

    def shown(self, figures: Mapping[str, float]) -> str:
        named = (("good", "chosen_reward"), ("bad", "rejected_reward"))
        # A step may have no answer of one kind.
        rewards = [f"{figures[name]:.4f} {word}" for word, name in named if name in figures]
        return f" | rewards {', '.join(rewards)} | KL {figures['kl']:.4f}"


@dataclass(frozen=True, kw_only=True)
class RatedFeeder(Feeder):
    """Estimates the divergence before each step, with the weights of the moment.

    Its `microbatches` have both rows of each sample, and those of `updates` only the row that is learned.
    """

    engine: Engine
    completing: Feeder
    """Adds the images of both rows, which the encoder reads once."""

    def completed(self, made: Microbatch, arrays: Batch) -> Microbatch:
        return self.completing.completed(made, arrays)

    def updates(self, consumed: int, batch: Batch) -> Iterator[list[Microbatch]]:
        both = self.microbatches(batch)
        learned = [_rows(each, 0) for each in both]
        divergence = self._divergence([_rows(each, 1) for each in both], batch["reference"][..., 1])
        made = []
        for number, each in enumerate(learned):
            good = moved(batch[GOOD][number, :, 0], self.device)
            reference = moved(batch["reference"][number, :, 0], self.device)
            extras = {
                GOOD: good,
                REFERENCE: reference,
                DIVERGENCE: divergence.expand_as(good),
            }
            made.append(replace(each, extras=extras))
        yield made

    def _divergence(self, others: Sequence[Microbatch], reference: Tensor) -> Tensor:
        """Return the mean gain of the answers to other questions in this step, at least 0: float64 [1]. Collective.

        reference: the reference's log-probabilities, [microbatches, rows] of this rank.
        """
        measured = self.engine.log_probs(others).mean()
        replicas = self.engine.grid.group("replicas")
        # Context ranks have the same answers, and as many as any data-parallel rank.
        known = moved(reference.mean().view(1), self.device) / comm.size(replicas)
        comm.all_reduce(known, replicas)
        return (measured - known).clamp(min=0)


def _rows(batch: Microbatch, first: int) -> Microbatch:
    """Return every second row of a microbatch."""
    rows = slice(first, None, 2)

    def taken(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return replace(
        batch,
        tokens=batch.tokens[rows],
        labels=batch.labels[rows],
        loss_mask=taken(batch.loss_mask),
        pair_positions=taken(batch.pair_positions),
        joint=taken(batch.joint),
        pictures=None if batch.pictures is None else batch.pictures.of(rows),
    )
