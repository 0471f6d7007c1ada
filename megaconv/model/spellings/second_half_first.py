"""A matrix whose two halves of columns are exchanged, as MiMo's projection into its multi-token prediction layers."""

from dataclasses import dataclass

from megaconv.model.rank import Rank
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class SecondHalfFirst(Separate):
    """A matrix whose two halves of columns are exchanged in this naming scheme."""

    def refusal(self, tp: int | None) -> str:
        if tp != 1:
            return ""
        return "SecondHalfFirst has to have whole rows; tp 1 would exchange the halves of each rank's columns"

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        name, whole = native.only_region()
        half = whole.box.cols // 2
        middle = whole.box.col0 + half
        first = Region(whole.box._replace(col1=middle), whole.row, half)
        second = Region(whole.box._replace(col0=middle), whole.row, 0)
        return native._replace(parts={name: (first, second)})
