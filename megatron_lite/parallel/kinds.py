"""What a module declares about each parameter that it has, where it makes it: who else has it, and what of its gradient they see."""

from collections.abc import Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import nn


class Kind(Enum):
    """Of a parameter."""

    SHARDED = "each tensor rank has its own part"
    VOCABULARY = "the same, of a table of words, of which tied ends of a pipeline have a copy each"
    OF_TOKENS = (
        "each tensor rank has a copy, which sees its rank's tokens alone under sequence parallelism, else all of them"
    )
    OF_HEADS = "each tensor rank has a copy, which sees its rank's heads alone"
    EXPERT = "a part of one expert, which sees all tokens that come to it"
    UNTRAINED = "each tensor rank has a copy, in float32, without gradient and optimizer; something else changes it"

    @property
    def copied(self) -> bool:
        """Whether every tensor rank has all of it."""
        return self in (Kind.OF_TOKENS, Kind.OF_HEADS, Kind.UNTRAINED)


@runtime_checkable
class Declares(Protocol):
    """A module with parameters of its own."""

    kinds: Mapping[str, Kind]
    """By name; a name that the module lacks, such as a bias, does no harm."""


def declared(module: nn.Module) -> dict[str, Kind]:
    """Every parameter in a module, by its whole name, in the order in which modules were made: that of their use."""
    found: dict[str, Kind] = {}
    for path, inner in module.named_modules():
        for name, _ in inner.named_parameters(recurse=False):
            assert isinstance(inner, Declares), f"{type(inner).__name__} doesn't declare its parameters"
            found[f"{path}.{name}" if path else name] = inner.kinds[name]
    return found
