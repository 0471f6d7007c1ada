"""Chats with images: the language model of a multimodal model learns answers, and its encoder reads the images."""

from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.image_models import multimodal_model
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.settings.config import Settings


class ImageChats(Objective):
    """The next token of chats that may have images."""

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "ImageChats | None":
        reads_chats = settings.data.finetune_data and multimodal_model(settings) is not None
        return cls() if reads_chats else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        check_sources(settings.data)
        return read_examples_of(settings, tokenizer, images=image_reader(settings))

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """Return the object that makes microbatches, with the encoder on each rank that computes the first layers."""
        return with_encoder(super().feeder(engine, start, data, setup), engine, data.reader, setup)
