"""A matrix in several native tensors, each with the next rows, as the tables of n-grams of Qwen4-Exp."""

from collections.abc import Iterator
from dataclasses import dataclass

from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class RowParts(Separate):
    """One canonical tensor in several native tensors of equal numbers of rows. The last of them may have fewer rows.

    The name contains `{p}`, the number of the part.
    """

    parts: str = ""
    """The number of parts, as a size of the model. If the model has 0 of them, one tensor holds all rows."""
    whole: str = ""
    """The name of that tensor."""
    first: str = "0"
    """The number of the first part, as a size of the model."""

    def refusal(self, tp: int | None) -> str:
        del tp
        return "RowParts is for files that no ranks share"

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        (shard,) = pieces.whole()
        (count,) = evaluate(self.parts, pieces.rank.whole)
        if not count:
            yield Template(pieces.joined(self.whole, [shard]))
            return
        (first,) = evaluate(self.first, pieces.rank.whole)
        rows = shard.box.rows
        each = -(-rows // count)
        for part, row in enumerate(range(0, rows, each), first):
            box = shard.box._replace(row0=row, row1=min(row + each, rows))
            name = self.name.replace("{p}", str(part))
            native = pieces.joined(name, [shard._replace(box=box)])
            # Each part is the only one with its rows, also if all ranks would hold it.
            yield Template(native._replace(replicated=False))
