"""Modules declare their parameters: which ranks hold each, which part of its gradient they compute, and a fixed dtype."""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


class Kind(Enum):
    """The kind of a parameter."""

    SHARDED = "each tensor rank has its own part"
    VOCABULARY = "the same, for the rows of the vocabulary; with tied weights, the first and the last stage have a copy each"
    OF_TOKENS = "each tensor rank has a copy, which processes its rank's tokens with sequence parallelism, else all tokens"
    OF_HEADS = "each tensor rank has a copy, which processes only its rank's heads, or its columns of an MLP"
    EXPERT = "a part of one expert, which processes all tokens that are routed to it"
    UNTRAINED = (
        "each tensor rank has a copy, without gradient and optimizer; something else changes it"
    )

    CONSTANT = "each tensor rank has a copy, without gradient; the optimizer has its state, as Megatron's, and leaves it as it is"

    @property
    def copied(self) -> bool:
        """True if every tensor rank has the whole parameter."""
        return self in (Kind.OF_TOKENS, Kind.OF_HEADS, Kind.UNTRAINED, Kind.CONSTANT)


@runtime_checkable
class Declares(Protocol):
    """A module that has parameters."""

    kinds: Mapping[str, Kind]
    """The kinds by parameter name. Names that the module lacks, such as a bias, are ignored.

    A module may also have the attribute `in_float32`: the names of parameters that are float32 in a model of any dtype.
    """


class Declaration(NamedTuple):
    """The declaration of one parameter."""

    kind: Kind
    in_float32: bool = False
    """True: float32, whatever the model's dtype."""


def declared(module: "nn.Module") -> dict[str, Declaration]:
    """Return the declaration of every parameter in a module by its full name.

    The order is that in which modules were created, which is also the order of their use.
    """
    found: dict[str, Declaration] = {}
    for path, inner in module.named_modules():
        for name, _ in inner.named_parameters(recurse=False):
            assert isinstance(inner, Declares), (
                f"{type(inner).__name__} doesn't declare its parameters"
            )
            in_float32 = name in getattr(inner, "in_float32", ())
            found[f"{path}.{name}" if path else name] = Declaration(inner.kinds[name], in_float32)
    return found


class ParametersFreed(RuntimeError):
    """A use of sharded parameters that no pass and no region keeps in memory."""

    def __init__(self) -> None:
        super().__init__(
            "the parameters are sharded over data-parallel ranks and not in memory; use them inside Engine.whole_parameters()"
        )
