"""The rank whose native tensors are computed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megaconv.model.layout import Layout

RANKS = {
    "tp": "tensor parallel size (tp)",
    "etp": "expert tensor parallel size (etp)",
    "ep": "expert parallel size (ep)",
}
"""Kind of parallelism -> its name in messages."""


@dataclass(frozen=True)
class Rank:
    """One rank of a layout, with the sizes that shapes are evaluated in."""

    layout: Layout
    whole: Mapping[str, int]
    """Sizes of the whole model, with the padded vocabulary."""
    sizes: Mapping[str, int]
    """Sizes of this rank's share."""
    tp_rank: int
    ep_rank: int
    etp_rank: int

    @property
    def experts(self) -> range:
        """The global numbers of this rank's experts."""
        count = self.sizes["local_experts"]
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    def of_layer(self, own: Mapping[str, int], shares: Mapping[str, int]) -> "Rank":
        """The same rank, for a layer with sizes of its own. shares: the rank's shares of these sizes."""
        return replace(self, whole={**self.whole, **own}, sizes={**self.sizes, **shares})
