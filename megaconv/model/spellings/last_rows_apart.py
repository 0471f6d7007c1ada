"""A matrix whose last rows are in a native tensor of their own, as the embedding of Molmo 2."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.tensor import Box
from megaconv.model.layout import divide
from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import RANKS
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class LastRowsApart(Separate):
    """One canonical tensor in two native tensors: its first rows, and its last rows.

    Each rank holds its share of both.
    """

    rest: str = ""
    """The name of the native tensor with the last rows."""
    rows: str = ""
    """The number of last rows, as a size of the model; empty for half of the rows, rounded down."""

    def refusal(self, tp: int | None) -> str:
        return "" if tp == 0 else "LastRowsApart shards rows, so that it needs tp 0"

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        (whole,) = pieces.whole()
        every = whole.box.rows
        last = evaluate(self.rows, pieces.rank.whole)[0] if self.rows else every // 2
        first = every - last
        for name, row0, rows in ((self.name, 0, first), (self.rest, first, last)):
            own = divide(rows, pieces.rank.layout.tp, f"rows of {name}", RANKS["tp"])
            start = row0 + pieces.rank.tp_rank * own
            shard = whole._replace(box=Box(start, start + own, whole.box.col0, whole.box.col1))
            yield Template(pieces.joined(name, [shard]), each_expert=False)
