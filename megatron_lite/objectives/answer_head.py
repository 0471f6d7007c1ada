"""Prepares a checkpoint for training on a task. A missing head for the task is initialized; other heads are removed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed
from megaconv.model.ir import Key
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.tasks.examples import Task

OTHER_HEADS: Mapping[str, Any] = {
    "head.activation": "", "head.binary": False, "head.classes": 0, "head.choices": False, "tie_embeddings": False,
}  # fmt: skip


def with_head(start: Start, task: Task, std: float, seed: int, say: Callable[[str], None]) -> Start:
    """Return the start with a head for the task.

    std, seed: of the weights of a new head; its biases are 0. say: receives a line that lists new and removed tensors.
    Raises UsageError for a continued run of another task, and for a BERT without a pooler.
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
    held = start.weights
    kept = {
        name for name, shape in shapes.items() if name in held and tuple(held[name].shape) == shape
    }
    fresh = initial_weights(trained, std, seed)
    tensors: dict[Key, LazyTensor] = {}
    for name in shapes:
        tensors[Key(name)] = held[name] if name in kept else fresh[name]
    new = ", ".join(sorted(shapes.keys() - kept))
    left_out = sorted({name.rpartition(".")[0] for name in held.keys() - kept})
    say(f"new for {task.name}: {new}; left out of {start.path}: {', '.join(left_out) or 'nothing'}")
    header = replace(start.header, config=trained)
    return replace(start, header=header, tensors=tensors)


def _named(config: ModelConfig, task: Task) -> ModelConfig:
    """Return the config with its own config.json that names the classes, if the family can write one."""
    try:
        raw = json.loads(family(config.family).config_json(config))
    except NotExpressible:
        return config
    if not task.labels:
        return replace(config, hf=raw)
    names = {str(number): name for number, name in enumerate(task.labels)}
    return replace(
        config,
        hf={
            **raw,
            "id2label": names,
            "label2id": {name: int(number) for number, name in names.items()},
        },
    )
