"""The common part of objectives that compare answers with those of a reference model."""

from typing import ClassVar

from megatron_lite.objectives.dropout import without_dropout
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Say
from megatron_lite.settings.options import ModelOptions


class Compared(Objective):
    """Answers, whose log-probabilities are compared with a reference model's."""

    perplexity: ClassVar = False
    learning_rate: ClassVar = 1e-6
    adapter_learning_rate: ClassVar = 1e-5

    def options(self, options: ModelOptions, say: Say) -> ModelOptions:
        """Return the options without the model's dropout. Adapters keep their dropout."""
        return without_dropout(options, say, "answers are compared with the reference's")
