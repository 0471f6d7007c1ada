"""Prepares a checkpoint for the training of a reward model: a new head of scores takes the place of a head for words."""

from collections.abc import Callable
from dataclasses import replace

from formats.tensor import LazyTensor
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.ir import Key
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import Start
from megatron_lite.objectives.scored_model import scored


def with_score_head(start: Start, std: float, seed: int, say: Callable[[str], None]) -> Start:
    """Return the start with a head for one score; unchanged if it has one.

    std, seed: of the weights of a new head. say: receives a line that lists new and removed tensors. Raises UsageError
    for a continued run of another objective, NotExpressible for a model that can't become a reward model.
    """
    config = scored(start.config, start.path)
    if config is start.config:
        return start
    if start.arguments:
        raise UsageError(
            f"{start.path} holds a run on something else than rewards; --load it with another --save to start from its weights"
        )
    held = start.weights
    fresh = initial_weights(config, std, seed)
    tensors: dict[Key, LazyTensor] = {}
    for name in canonical_shapes(family(config.family).rows, config):
        tensors[Key(name)] = held.get(name, fresh[name])
    left_out = sorted(held.keys() - {key.name for key in tensors})
    new = ", ".join(sorted(key.name for key in tensors if key.name not in held))
    say(f"new: {new}; left out of {start.path}: {', '.join(left_out) or 'nothing'}")
    return replace(start, header=replace(start.header, config=config), tensors=tensors)
