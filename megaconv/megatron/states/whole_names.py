"""Names in a Megatron model that sees or hears: `language_model.` before those of the language model, nothing before the others.

Inside megaconv it is the other way round: the language model has the names that it has by itself, and BESIDE stands before the others.
Source: Megatron-Bridge's models, whose `language_model` is a GPTModel or a MambaModel.
"""

from collections.abc import Mapping
from typing import TypeVar

from megaconv.model.beside import BESIDE

LANGUAGE_MODEL = "language_model."
T = TypeVar("T")


def apart(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """(the language model's, those beside it by their own names); of a model by itself all and none."""
    if not any(name.startswith(LANGUAGE_MODEL) for name in tensors):
        return dict(tensors), {}
    inside = {name: value for name, value in tensors.items() if name.startswith(LANGUAGE_MODEL)}
    others = {name: value for name, value in tensors.items() if name not in inside}
    return {name.removeprefix(LANGUAGE_MODEL): value for name, value in inside.items()}, others


def in_whole(name: str) -> str:
    """As a checkpoint of a whole model has it."""
    return name.removeprefix(BESIDE) if name.startswith(BESIDE) else LANGUAGE_MODEL + name
