"""Distillation: a student learns the predictions of a teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.models.purposes import refuse_taught
from megatron_lite.models.teaching import combined
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.image_models import TEACHER_FLAG
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.teacher import TaughtFeeder, load_teacher, teacher_reader
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.parallel.payload import Payload
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import Distillation

CROSS_ENTROPY, DIVERGENCE = "cross_entropy", "divergence"
"""Reported next to the loss."""


class Taught(Objective):
    """The next token, as a teacher predicts it. The data are those of training without a teacher."""

    perplexity: ClassVar = False

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Taught | None":
        return cls() if settings.distilling.teacher_load else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """See Objective.read. Chats may have images."""
        if not settings.data.finetune_data:
            return super().read(settings, tokenizer)
        check_sources(settings.data)
        return read_examples_of(settings, tokenizer, images=image_reader(settings))

    def criterion(self, settings: Settings) -> Criterion:
        asked = settings.distilling
        return TeacherLoss(
            Distillation(asked.distill_alpha, asked.distill_temperature, asked.distill_beta)
        )

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """See Objective.feeder. It loads the teacher, and both encoders if there are images."""
        plain = super().feeder(engine, start, data, setup)
        assert setup.teacher is not None
        asked = setup.settings.distilling.teacher_image_encoder
        of_teacher = teacher_reader(setup.teacher, data.reader, asked)
        teacher = load_teacher(engine, setup.teacher, setup)
        return TaughtFeeder(
            **vars(plain),
            teacher=teacher,
            learned=with_encoder(plain, engine, data.reader, setup),
            taught=with_encoder(plain, teacher, of_teacher, setup, TEACHER_FLAG),
        )


@dataclass(frozen=True)
class TeacherLoss(Criterion):
    """The divergence of next tokens from a teacher's predictions, and their cross entropy."""

    trains_mtp = False
    options: Distillation

    def check(self, config: ModelConfig) -> None:
        refuse_taught(config)

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", CROSS_ENTROPY, DIVERGENCE

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss."""
        assert isinstance(stage, ModelChunk)
        weights = run.label_weights()
        total, *losses = stage.taught_losses(given, run, weights * run.share, self.options)
        cross_entropy, divergence = losses
        loss = combined(cross_entropy, divergence, self.options)
        named = {"loss": loss, CROSS_ENTROPY: cross_entropy, DIVERGENCE: divergence}
        return total, {name: Counted(each, weights) for name, each in named.items()}
