"""The language model of Step 3.7 with its head, which transformers has only inside the whole model."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    Step3p7TextConfig,
    Step3p7TextModel,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""A small encoder, which text doesn't need."""


class StepLanguage(Step3p7PreTrainedModel, GenerationMixin):
    """transformers' own text model, and the whole model's own head."""

    config: Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_config(cls, config: Step3p7TextConfig, **options: Any) -> "StepLanguage":
        made: StepLanguage = cls._from_config(config, **options)
        return made

    @classmethod
    def from_pretrained(
        cls, directory: Path, *, config: Step3p7TextConfig, **options: Any
    ) -> "StepLanguage":
        """Load as a part of the whole model, whose class knows the names of published files."""
        both = Step3p7Config(text_config=config.to_dict(), vision_config=VISION)
        whole = Step3p7ForConditionalGeneration.from_pretrained(directory, config=both, **options)
        made = cls.from_config(config, **options)
        made.model, made.lm_head = whole.model.language_model, whole.lm_head
        return made

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        options.pop("logits_to_keep", None)
        found = self.model(input_ids, **options)
        logits = self.lm_head(found.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        """Save under the names of the class, with the architecture of published files."""
        super().save_pretrained(directory, save_original_format=False, **options)
        path = directory / "config.json"
        named = json.loads(path.read_text()) | {"architectures": ["Step3p5ForCausalLM"]}
        path.write_text(json.dumps(named, indent=2))
