"""A tensor that is stored with a number added, such as norms that multiply by their weight + 1."""

from dataclasses import dataclass

from megaconv.model.rank import Rank
from megaconv.model.regions import NativeTensor
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class Shifted(Separate):
    """A tensor that this naming scheme stores with a number added: -1 for norms that multiply by their weight + 1."""

    by: int

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        return native._replace(shift=self.by)
