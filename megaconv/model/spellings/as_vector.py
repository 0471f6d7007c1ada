"""A canonical tensor without its axes of size 1, as a vector."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaconv.model.patterns import expand
from megaconv.model.pieces import Pieces, Template
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class AsVector(Separate):
    """A canonical tensor [1, 1, size, 1] as a vector [size], whose only axis is sharded if an axis of the tensor is."""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        by_rows = replace(pieces, tp=None if pieces.tp is None else 0)
        for name, shard in zip(expand(self.name), by_rows.shards(), strict=True):
            native = by_rows.joined(name, [shard])
            yield Template(native._replace(shape=(shard.box.rows,)), each_expert=pieces.of_experts)
