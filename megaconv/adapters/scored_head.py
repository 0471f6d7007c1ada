"""The head of scores that an adapter of a classifier, a reward model or a critic holds.

    adapter_config.json   task_type SEQ_CLS or TOKEN_CLS
    base_model.model.score.weight   [labels, hidden]; score.bias [labels] of TOKEN_CLS

Its base is a language model, whose files have no `score`. transformers made a new head for the training, peft saved it
whole (modules_to_save), and the head for words isn't part of the class. Source: peft 0.21.2, peft_model.py.
"""

from megaconv.adapters.peft_files import Adapter
from megaconv.families.parts.scores import class_with_scores
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

_WEIGHT, _BIAS = "score.weight", "score.bias"


def with_scored_head(adapter: Adapter, config: ModelConfig) -> ModelConfig:
    """The configuration with the adapter's head of scores; unchanged if there is none, or if the base has one.

    Raises NotExpressible if transformers has no class with such a head for the family.
    """
    head = adapter.replaced.get(_WEIGHT)
    if head is None or config.own_names is not None or config.has("scores"):
        return config
    has_bias = _BIAS in adapter.replaced
    fields = {
        "head.labels": head.shape[0],
        "head.labels_bias": has_bias,
        "head.of_tokens": has_bias,
        "tie_embeddings": False,
    }
    scored = changed(config, fields)
    class_with_scores(scored)
    return scored


def notice_of_head(before: ModelConfig, after: ModelConfig) -> str | None:
    """Text for people if an adapter replaced the head for words; None if it didn't."""
    if before.has("scores") or not after.has("scores"):
        return None
    return f"the adapter's head of scores replaces the head for words: the output is a {class_with_scores(after)}"
