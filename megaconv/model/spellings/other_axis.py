"""A tensor that one naming scheme shards along another axis than the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaconv.model.pieces import Pieces, Template
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class OtherAxis(Separate):
    """A tensor that this naming scheme shards along another axis than the row's `tp`."""

    tp: int

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        yield from super().natives(replace(pieces, tp=self.tp))
