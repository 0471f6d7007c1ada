"""A checkpoint as what a model for a task starts from: with a head for it, new where it has none, in the place of other heads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig, value_of
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.weights import initial_weights
from megatron_lite.data.tasks.examples import Task

OTHER_HEADS: Mapping[str, Any] = {
    "head.activation": "", "head.binary": False, "head.classes": 0, "head.choices": False, "tie_embeddings": False,
}  # fmt: skip


def with_head(start: Start, task: Task, std: float, seed: int, say: Callable[[str], None]) -> Start:
    """std, seed: of a new head's weights; biases are 0. say: gets a line on what is new and what is left out.

    Raises UsageError for a run of another task that would be continued, and for a BERT without a pooler.
    """
    config = start.config
    if all(value_of(config, name) == value for name, value in task.head.items()):
        return start
    if start.arguments:
        raise UsageError(
            f"{start.path} holds a run on something else than {task.name}; --load it with another --save to start from its weights"
        )
    if not config.has("pooler"):
        raise UsageError(
            f"{start.path}: the BERT has no pooler, on which a head for {task.name} stands; take one that was trained with its binary head"
        )
    trained = _named(changed(config, {**OTHER_HEADS, **task.head}), task)
    shapes = canonical_shapes(family(config.family).rows, trained)
    held = {key.name: tensor for key, tensor in start.tensors.items() if key.slot == WEIGHT}
    new = {name for name, shape in shapes.items() if name not in held or tuple(held[name].shape) != shape}
    fresh = initial_weights(trained, std, seed)
    tensors: dict[Key, LazyTensor] = {Key(name): fresh[name] if name in new else held[name] for name in shapes}
    left_out = sorted({name.rpartition(".")[0] for name in held if name not in shapes or name in new})
    say(f"new for {task.name}: {', '.join(sorted(new))}; left out of {start.path}: {', '.join(left_out) or 'nothing'}")
    return replace(start, header=replace(start.header, config=trained), tensors=tensors)


def _named(config: ModelConfig, task: Task) -> ModelConfig:
    """With its own config.json, where it can have one, in which the classes have their names."""
    try:
        raw = json.loads(family(config.family).config_json(config))
    except NotExpressible:
        return config
    if not task.labels:
        return replace(config, hf=raw)
    names = {str(number): name for number, name in enumerate(task.labels)}
    return replace(
        config, hf={**raw, "id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    )
