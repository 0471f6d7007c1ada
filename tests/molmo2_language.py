"""The language model of Molmo 2 with its head, which transformers has only inside the whole model."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Molmo2TextConfig, Molmo2TextModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.molmo2.modeling_molmo2 import Molmo2PreTrainedModel


class Molmo2Language(Molmo2PreTrainedModel):
    """transformers' own text model, and the whole model's own head."""

    config: Molmo2TextConfig

    def __init__(self, config: Molmo2TextConfig) -> None:
        super().__init__(config)
        self.model = Molmo2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_config(cls, config: Molmo2TextConfig) -> "Molmo2Language":
        return cls(config)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        """Save under the names of the class. Published files have the names of a whole model."""
        super().save_pretrained(directory, save_original_format=False, **options)
