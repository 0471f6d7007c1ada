"""The adapters of a layer on one rank: their parameters, and the numbers that they leave and exchange.

An adapter is two matrices, A [r, in] and B [out, r]. For each token, r numbers pass from A to B. DoRA also has a magnitude
[out], whose gradient needs the output of the adapted matrix.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerAdapters:
    """The adapters of one layer, whose own weights are frozen. Sizes are those of one rank."""

    dense: int = 0
    """Parameters of all adapters except those of experts."""
    experts: int = 0
    """Parameters of the adapters of the rank's experts."""
    columns: int = 0
    """Numbers of a token between A and B, for the matrices that tensor ranks shard by columns: r for each module."""
    rows: int = 0
    """The same for matrices sharded by rows."""
    whole: int = 0
    """The same for matrices that every tensor rank has."""
    of_expert: int = 0
    """The same for a row of an expert."""
    scaled: int = 0
    """Outputs with DoRA of the matrices that tensor ranks shard by columns."""
    scaled_sums: int = 0
    """The same for other matrices, whose outputs are for the rank's own tokens."""
    lengths: int = 0
    """Rows with DoRA of the matrices that tensor ranks shard by rows: a pass sums the squares of their lengths."""
    copied: int = 0
    """Elements of the A matrices, which a pass keeps once more side by side."""
    dropped: int = 0
    """Widths of the inputs to which adapters apply dropout."""
    dropped_of_expert: int = 0
    """The same for a row of an expert."""
    inputs: frozenset[str] = frozenset()
    """The places of INPUTS at which a matrix has an adapter."""

    @property
    def parameters(self) -> int:
        """Parameters of all adapters of the layer."""
        return self.dense + self.experts


INPUTS = ("mixer", "fc1", "fc2")
"""Places of matrices: the mixer's first ones, the MLP's first one, and the MLP's second one."""
NO_ADAPTERS = LayerAdapters()
