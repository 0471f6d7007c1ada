"""The model that reward modeling trains: a decoder whose head gives a text one score."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.families.parts.scores import SEQUENCE, classes_with_scores
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

SCORED: Mapping[str, Any] = {
    "head.labels": 1, "head.labels_bias": False, "head.of_tokens": False, "tie_embeddings": False,
}  # fmt: skip
"""Fields of a model with a head that gives a text one score."""


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
    return changed(_without_mtp(config), SCORED)


def _without_mtp(config: ModelConfig) -> ModelConfig:
    """Return the configuration without layers that predict further tokens, which need a head for words."""
    if not config.mtp_layers:
        return config
    made = changed(config, {"mtp_layers": 0})
    if config.hf is None:
        return made
    # Otherwise config.json keeps its number: files may have fewer layers than it lists.
    own = family(config.family)
    before, after = own.write_hf(config), own.write_hf(made)
    counts = {name: value for name, value in after.items() if before.get(name) != value}
    kept = {name: value for name, value in config.hf.items() if own.aliases.get(name) not in counts}
    return replace(made, hf={**kept, **counts})


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
