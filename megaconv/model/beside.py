"""The parts of a multimodal model outside its language model: vision or audio encoders and projectors.

    beside.visual.blocks.0.attn.qkv.weight      canonical: BESIDE and Megatron's name

Most of these parts are copied unchanged, and no table lists their tensors. megaconv reads their names and shapes from
the source. Each tensor becomes a row of the first pipeline stage, and tensor parallelism doesn't shard it. Encoders
that Megatron builds from its layers have a table (families/parts/towers.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from formats.tensor import Shape
from megaconv.model.rows import Row

BESIDE = "beside."
"""Prefix of these tensors' names in every naming scheme, as long as megaconv holds them."""

TOWER = "vision_model."
"""Prefix of the names of an encoder that Megatron builds from its layers."""


class Beside(NamedTuple):
    """One tensor outside the language model."""

    name: str
    """The tensor's name in Megatron."""
    hf: str
    shape: Shape
    """The tensor's shape in Megatron."""
    transposed: bool = False
    """True if transformers stores the transposed tensor."""


@dataclass(frozen=True)
class Whole:
    """The multimodal model that a language model is a part of."""

    config: Mapping[str, Any]
    """The multimodal model's config.json, unchanged."""
    begin: str = ""
    """Prefix of the language model's tensor names in the standalone language model."""
    inside: str = ""
    """Prefix of the same names inside the multimodal model."""
    experts: tuple[str, ...] = ()
    """Form of the experts in the multimodal model: variants of the naming scheme `hf`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(prefix in transformers' files, the same prefix in Megatron) for tensors outside the language model."""
    tensors: tuple[Beside, ...] = ()
    """The tensors that are copied unchanged."""
    tower: tuple[Row, ...] = ()
    """The table of an encoder that Megatron builds from its layers; empty if the encoder is copied unchanged."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes that the shapes of this table are written in."""

    def hf_name(self, name: str) -> str:
        """The name of a tensor in transformers' files.

        name: the tensor's name in the standalone language model, or its name with the prefix BESIDE.
        """
        if name.startswith(BESIDE):
            return name.removeprefix(BESIDE)
        return self.inside + name[len(self.begin) :] if name.startswith(self.begin) else name

    def builds(self, name: str) -> bool:
        """True if a tensor belongs to an encoder that Megatron builds from its layers.

        name: the tensor's Megatron name with the prefix BESIDE.
        """
        return bool(self.tower) and name.startswith(BESIDE + TOWER)

    def parts(self) -> dict[str, int]:
        """Count the tensors outside the language model: first word of their names -> number of tensors."""
        copied = Counter(each.name.partition(".")[0] for each in self.tensors)
        counts = {
            "tower": self.sizes.get("tower_layers", 0),
            "deepstack": self.sizes.get("tower_deepstack", 0),
        }
        for row in self.tower:
            word = row.canonical.removeprefix(BESIDE).partition(".")[0]
            each = len(row.shapes) if "|" in row.names["core"][0].name else 1
            copied[word] += each * counts.get(row.stage, 1)
        return dict(copied)
