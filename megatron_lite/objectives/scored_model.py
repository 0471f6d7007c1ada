"""The model that reward modeling trains: a decoder whose head gives a text one score."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.scores import SEQUENCE, classes_with_scores
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

SCORED: Mapping[str, Any] = {
    "head.labels": 1, "head.labels_bias": False, "head.of_tokens": False, "tie_embeddings": False,
    "mtp_layers": 0,
}  # fmt: skip
"""Fields of a model with a head that gives a text one score. Without a head for words, no layer predicts further tokens."""


def scored(config: ModelConfig, place: str) -> ModelConfig:
    """Return the configuration of a model with a head for one score; unchanged if it has one.

    place: the path that the configuration was read from. Raises NotExpressible for a model that can't become a reward
    model.
    """
    if config.has("scores"):
        _require_one_score(config, place)
        return config
    if not any(name.endswith(SEQUENCE) for name in classes_with_scores(config.family)):
        raise NotExpressible(
            f"{place}: transformers has no {SEQUENCE} with a head of scores for the family {config.family}, so that no software "
            "could load a reward model of it; docs/reward-models.md lists the families"
        )
    return changed(config, SCORED)


def _require_one_score(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a head that gives more than one score of a text. place: the path it was read from."""
    head = config.head
    if head.labels == 1 and not head.labels_bias and not head.of_tokens:
        return
    bias = " and a bias" if head.labels_bias else ""
    kind = "each token" if head.of_tokens else "a text"
    raise NotExpressible(
        f"{place}: the head of scores has {head.labels} labels of {kind}{bias}; --reward-modeling trains a head without a bias that "
        "gives a text one score: start from a language model or a reward model"
    )
