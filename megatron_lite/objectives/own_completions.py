"""Distillation on the student's own completions of prompts: the teacher predicts each of their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.prompts import stop_ids
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader
from megatron_lite.objectives.prompt_images import PromptImages
from megatron_lite.objectives.prompts import PromptData, prompts_of
from megatron_lite.objectives.rollouts import CompletingFeeder
from megatron_lite.objectives.sampler import Sampler
from megatron_lite.objectives.taught import Taught
from megatron_lite.objectives.teacher import TaughtFeeder
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.settings.config import Settings


class TaughtCompletions(Taught):
    """A sample is a prompt, which has one completion."""

    tokens: ClassVar = ()

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "TaughtCompletions | None":
        return cls() if settings.distilling.distill_on_policy else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the prompts. Raises UsageError, CorruptCheckpoint."""
        images = image_reader(settings)
        train, valid = prompts_of(settings, tokenizer, images)
        longest = settings.grpo.max_completion_length
        return PromptData(train, valid, (), longest, generations=1, images=images)

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """Return the object that samples completions with the engine's weights, and loads the teacher."""
        assert isinstance(data, PromptData)
        taught = super().feeder(engine, start, data, setup)
        assert isinstance(taught, TaughtFeeder)
        images = PromptImages.of(taught.learned, data.prompts)
        settings = setup.settings
        sampler = Sampler(
            engine,
            setup.tokenizer,
            stop_ids(setup.config, setup.tokenizer, {} if start is None else start.files),
            data.rewards,
            replace(settings.grpo, num_generations=data.generations),
            settings.training.seed,
            images,
        )
        return TaughtCompleter(**vars(taught), prompts=data.prompts, sampler=sampler, images=images)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        return Microbatch(batch["tokens"], batch["labels"], batch["loss_mask"])


@dataclass(frozen=True, kw_only=True)
class TaughtCompleter(CompletingFeeder, TaughtFeeder):
    """Makes microbatches of completions with the teacher's predictions."""

    def updates(self, consumed: int, batch: Batch) -> Iterator[list[Microbatch]]:
        """See Feeder.updates."""
        asked = self.asked(batch)
        completions = self.sampler.complete(asked, consumed)
        yield self.microbatches(self.own_rows(self.rows(asked, completions), batch))
