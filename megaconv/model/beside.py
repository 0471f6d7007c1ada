"""A model that sees or hears: a language model, and beside it a tower and a projector, whose tensors are copied as they are.

    beside.visual.blocks.0.attn.qkv.weight      canonical: BESIDE and the name that it has in Megatron

No table lists them. Their names and shapes are read off the source, and every one becomes a row of the first pipeline stage
that tensor parallelism doesn't shard.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from formats.tensor import Shape

BESIDE = "beside."
"""Before the names of these tensors, in every naming scheme, for as long as megaconv has them."""


class Beside(NamedTuple):
    """One tensor beside the language model."""

    name: str
    """In Megatron."""
    hf: str
    shape: Shape
    """In Megatron."""
    transposed: bool = False
    """Whether transformers has it the other way round."""


@dataclass(frozen=True)
class Whole:
    """The model that a language model is a part of."""

    config: Mapping[str, Any]
    """Its config.json, unchanged."""
    begin: str = ""
    """How names of the language model's tensors begin in a model by itself ..."""
    inside: str = ""
    """... and here."""
    experts: tuple[str, ...] = ()
    """How its experts are stored there: variants of the naming scheme `hf`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(beginning of a name in transformers' files, the same in Megatron's) of what lies beside."""
    tensors: tuple[Beside, ...] = ()

    def hf_name(self, name: str) -> str:
        """What transformers' files call a tensor. name: as in a model by itself, or behind BESIDE."""
        if name.startswith(BESIDE):
            return name.removeprefix(BESIDE)
        return self.inside + name[len(self.begin) :] if name.startswith(self.begin) else name

    def parts(self) -> dict[str, int]:
        """What lies beside, by the first word of its names -> how many tensors."""
        return dict(Counter(each.name.partition(".")[0] for each in self.tensors))
