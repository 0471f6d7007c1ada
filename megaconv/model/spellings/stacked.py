"""All experts in one native tensor [experts, out, in]."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from formats.tensor import Shape
from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class Stacked(Separate):
    """All experts in one native tensor [experts, out, in]. The pieces of each expert are joined along the rows."""

    shape: str = ""
    """The tensor's declared shape, if it is the same memory with other axes."""

    joins: ClassVar[bool] = True
    holds_all_experts: ClassVar[bool] = True

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        shards = pieces.shards()
        experts = pieces.of_each_expert(shards)
        parts: dict[str, tuple[Region, ...]] = {}
        row = 0
        for names in experts:
            for name, shard in zip(names, shards, strict=True):
                parts[name] = (Region(shard.box, row),)
                row += shard.box.rows
        shape: Shape = (len(experts), row // len(experts), shards[0].box.cols)
        if self.shape:
            shape = evaluate(self.shape, pieces.rank.sizes)
        yield Template(NativeTensor(self.name, parts, shape, of_experts=True))
