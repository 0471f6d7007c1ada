"""Names in a multimodal Megatron model: the language model's names begin with `language_model.`, others have no prefix.

In megaconv it is the inverse: the language model's names have no prefix, and the others begin with BESIDE.
Source: Megatron-Bridge's models, whose `language_model` is a GPTModel or a MambaModel.
"""

from collections.abc import Mapping
from typing import TypeVar

from megaconv.model.beside import BESIDE

LANGUAGE_MODEL = "language_model."
T = TypeVar("T")


def split_multimodal(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """(the language model's tensors, the others under their own names).

    For a language model by itself: (all, none).
    """
    if not any(name.startswith(LANGUAGE_MODEL) for name in tensors):
        return dict(tensors), {}
    inside = {name: value for name, value in tensors.items() if name.startswith(LANGUAGE_MODEL)}
    others = {name: value for name, value in tensors.items() if name not in inside}
    return {name.removeprefix(LANGUAGE_MODEL): value for name, value in inside.items()}, others


def in_whole(name: str) -> str:
    """A name as a checkpoint of a multimodal model has it."""
    return name.removeprefix(BESIDE) if name.startswith(BESIDE) else LANGUAGE_MODEL + name
