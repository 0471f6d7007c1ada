"""Each canonical tensor in a separate native tensor. All other spellings derive from this one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from megaconv.model.patterns import expand
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeTensor


@dataclass(frozen=True)
class Separate:
    """A spelling that stores each of a row's tensors in a separate native tensor. A plain string means the same.

    A row may have several spellings at once. A spelling with `members` holds these tensors of the row (numbers in the
    row's order). A spelling without `members` holds all the others.

    A subclass is another way to store tensors. It overrides `stored` if each tensor stays in a native tensor of its
    own, and `natives` if it joins them. Regions with their own `Order` store rows or columns in another order.
    """

    name: str
    members: tuple[int, ...] | None = field(default=None, kw_only=True)

    joins: ClassVar[bool] = False
    """True if one native tensor holds all tensors of the spelling."""
    holds_all_experts: ClassVar[bool] = False
    """True if one native tensor holds all of a rank's experts."""

    def refusal(self, tp: int | None) -> str:
        """The reason why tensors sharded along this axis can't be stored so; empty if they can.

        Each rank would reorder its own shard instead of the whole tensor. The result is right with one tensor-parallel
        rank and wrong with more. A round trip doesn't show the error, since reading reverses it.
        """
        del tp
        return ""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        """Yield the native tensors that a rank holds. Raises LayoutError if a tensor can't be sharded."""
        for name, shard in zip(expand(self.name), pieces.shards(), strict=True):
            native = self.stored(pieces.joined(name, [shard]), shard.member, pieces.rank)
            yield Template(native, each_expert=pieces.of_experts)

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        """The native tensor of one canonical tensor.

        native: the native tensor with the rows in canonical order, as one region. member: the number of the canonical
        tensor in its row.
        """
        del member, rank
        return native
