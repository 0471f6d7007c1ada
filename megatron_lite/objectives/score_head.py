"""Prepares a checkpoint for the training of a reward model: a new head of scores takes the place of a head for words."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.families.parts.scores import SEQUENCE, classes_with_scores
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import Start

SCORED: Mapping[str, Any] = {
    "head.labels": 1, "head.labels_bias": False, "head.of_tokens": False, "tie_embeddings": False,
}  # fmt: skip
"""Fields of a model with a head that gives a text one score."""


def with_score_head(start: Start, std: float, seed: int, say: Callable[[str], None]) -> Start:
    """Return the start with a head for one score; unchanged if it has one.

    std, seed: of the weights of a new head. say: receives a line that lists new and removed tensors. Raises UsageError
    for a continued run of another objective, NotExpressible for a model that can't become a reward model.
    """
    config = start.config
    if config.has("scores"):
        _require_one_score(config, start.path)
        return start
    if start.arguments:
        raise UsageError(
            f"{start.path} holds a run on something else than rewards; --load it with another --save to start from its weights"
        )
    if not any(name.endswith(SEQUENCE) for name in classes_with_scores(config.family)):
        raise NotExpressible(
            f"{start.path}: transformers has no {SEQUENCE} with a head of scores for the family {config.family}, so that no software "
            "could load a reward model of it; docs/reward-models.md lists the families"
        )
    scored = changed(config, SCORED)
    held = {key.name: tensor for key, tensor in start.tensors.items() if key.slot == WEIGHT}
    fresh = initial_weights(scored, std, seed)
    tensors: dict[Key, LazyTensor] = {}
    for name in canonical_shapes(family(config.family).rows, scored):
        tensors[Key(name)] = held.get(name, fresh[name])
    left_out = sorted(held.keys() - {key.name for key in tensors})
    new = ", ".join(sorted(key.name for key in tensors if key.name not in held))
    say(f"new: {new}; left out of {start.path}: {', '.join(left_out) or 'nothing'}")
    return replace(start, header=replace(start.header, config=scored), tensors=tensors)


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
