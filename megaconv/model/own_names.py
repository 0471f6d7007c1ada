"""Models that no family describes. Nothing is known of their tensors, which therefore keep their own names.

Such a model can be copied, cast and compared. It can't be sharded, computed or renamed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.tensor import Shape
from megaconv.errors import UnsupportedInput
from megaconv.model.rows import Row

_OF_PATTERNS = frozenset("{}|")
"""Characters that have a meaning in a table's names."""


@dataclass(frozen=True)
class OwnNames:
    """All that is known of such a model."""

    config: Mapping[str, Any]
    """Its config.json, unchanged."""
    reason: str
    """The reason why no family describes it, for messages."""
    stays_quantized: bool = False
    """True if the weights are quantized by a method that megaconv doesn't read: their bytes are copied."""
    rows: tuple[Row, ...] = ()
    """One row for each tensor, in the order of the files."""

    @property
    def why(self) -> str:
        """The reason without a remedy."""
        return self.reason.partition("; ")[0]

    def with_tensors(self, shapes: Mapping[str, Shape], where: str) -> "OwnNames":
        """The same with these tensors. where: for messages. Raises UnsupportedInput for a name that no table can hold."""
        odd = next((name for name in shapes if _OF_PATTERNS & set(name)), None)
        if odd is not None:
            raise UnsupportedInput(f"{where}: {odd}: a name with {{, }} or | can't be kept")
        rows = (
            Row(name, (" ".join(map(str, shape)),), stage="first", hf=name)
            for name, shape in shapes.items()
        )
        return replace(self, rows=tuple(rows))
