"""A model that sees or hears: a language model, and beside it a tower and a projector.

    beside.visual.blocks.0.attn.qkv.weight      canonical: BESIDE and the name that it has in Megatron

Most towers are copied as they are: no table lists their tensors. Names and shapes are read off the source, and every one becomes a
row of the first pipeline stage that tensor parallelism doesn't shard. Those that Megatron has of its own layers have a table
(families/parts/towers.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.tensor import Shape

if TYPE_CHECKING:
    from megaconv.model.table import Row

BESIDE = "beside."
"""Before the names of these tensors, in every naming scheme, for as long as megaconv has them."""

TOWER = "vision_model."
"""How names of a tower begin that Megatron has of its own layers."""


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
    """What is copied."""
    tower: tuple["Row", ...] = ()
    """The table of a tower that Megatron has of its own layers; empty where it is copied."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Those that its shapes are written in."""

    def hf_name(self, name: str) -> str:
        """What transformers' files call a tensor. name: as in a model by itself, or behind BESIDE."""
        if name.startswith(BESIDE):
            return name.removeprefix(BESIDE)
        return self.inside + name[len(self.begin) :] if name.startswith(self.begin) else name

    def builds(self, name: str) -> bool:
        """Whether a tensor is of a tower that Megatron has of its own layers. name: in Megatron, behind BESIDE."""
        return bool(self.tower) and name.startswith(BESIDE + TOWER)

    def parts(self) -> dict[str, int]:
        """What lies beside, by the first word of its names -> how many tensors."""
        copied = Counter(each.name.partition(".")[0] for each in self.tensors)
        counts = {"tower": self.sizes.get("tower_layers", 0), "deepstack": self.sizes.get("tower_deepstack", 0)}
        for row in self.tower:
            word = row.canonical.removeprefix(BESIDE).partition(".")[0]
            each = len(row.shapes) if "|" in row.names["core"][0].name else 1
            copied[word] += each * counts.get(row.stage, 1)
        return dict(copied)
