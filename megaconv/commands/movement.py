"""Measures how far a model has moved from another: the relative size of the difference, per tensor and per layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np

from formats.tensor import LazyTensor
from megaconv.engine.fingerprints import read_blocks
from megaconv.model.ir import WEIGHT, Key, Source
from megaconv.threads import thread_pool
from megaconv.values.rounding import numbers
from megaconv.values.shifted import plain


@dataclass(frozen=True)
class Moved:
    """Sums over elements. Distance and largest difference are infinite if an element changed that isn't finite on both
    sides.
    """

    name: str
    elements: int = 0
    changed: int = 0
    squares: float = 0.0
    """Sum of the squares of A."""
    distance: float = 0.0
    """Sum of the squares of the difference."""
    largest: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the norm of A."""
        if self.squares:
            return sqrt(self.distance / self.squares)
        return inf if self.distance else 0.0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            self.name, self.elements + other.elements, self.changed + other.changed, self.squares + other.squares,
            self.distance + other.distance, max(self.largest, other.largest),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """For `--json`, where null stands for infinity."""
        return {
            "elements": self.elements,
            "changed": self.changed,
            "relative": self.relative,
            "max_abs": self.largest,
        }


@dataclass(frozen=True)
class Movement:
    tensors: tuple[Moved, ...]
    """The tensors that both sides have in the same shape, in the order of the model."""

    def layers(self) -> list[Moved]:
        """Sums by layer. A tensor outside of the layers stands for itself."""
        found: dict[str, Moved] = {}
        for tensor in self.tensors:
            name = _layer(tensor.name)
            found[name] = found.get(name, Moved(name)) + tensor
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": {tensor.name: tensor.to_json() for tensor in self.tensors},
            "layers": {layer.name: layer.to_json() for layer in self.layers()},
        }

    def lines(self, *, blocks: bool = True) -> Iterator[str]:
        """Lines for people, with a bar for each layer. blocks: True if the terminal can show block characters."""
        layers = self.layers()
        width = max((len(layer.name) for layer in layers), default=0)
        finite = [layer.relative for layer in layers if isfinite(layer.relative)]
        most = max(finite, default=0.0) or 1.0
        block = "█" if blocks else "#"
        yield f"{'moved':<{width}}  {'|A-B|/|A|':>10}  {'largest':>9}  changed"
        for layer in layers:
            length = round(30 * min(1.0, layer.relative / most))
            share = 100 * layer.changed / max(1, layer.elements)
            columns = [
                f"{layer.name:<{width}}",
                f"{layer.relative:>10.3e}",
                f"{layer.largest:>9.3g}",
                f"{share:>6.1f}%",
                block * length,
            ]
            yield "  ".join(columns).rstrip()


def _layer(name: str) -> str:
    """The layer's name: `layers.3` of `layers.3.attn.q.weight`."""
    words = name.split(".")
    numbered = next((at for at, word in enumerate(words) if word.isdecimal()), None)
    return name if numbered is None else ".".join(words[: numbered + 1])


def movement(
    left: Source, right: Source, workers: int, advance: Callable[[int], None] = lambda count: None
) -> Movement:
    """Compare the weights of two sources. Their dtypes may differ."""
    ours, theirs = (
        {key: tensor for key, tensor in side.tensors() if key.slot == WEIGHT}
        for side in (left, right)
    )
    keys = [
        key
        for key, tensor in ours.items()
        if key in theirs and tuple(theirs[key].shape) == tuple(tensor.shape)
    ]
    with thread_pool(workers) as pool:
        return Movement(
            tuple(pool.map(lambda key: _moved(key, ours[key], theirs[key], advance), keys))
        )


def _moved(key: Key, left: LazyTensor, right: LazyTensor, advance: Callable[[int], None]) -> Moved:
    total = Moved(key.name)
    # Blocks of equal size in bytes have different numbers of elements if the dtypes differ: keep the rest for the next
    # block.
    blocks_of_a = _blocks(plain(key, left), advance)
    blocks_of_b = _blocks(plain(key, right), lambda nbytes: None)
    nothing = np.empty(0)
    a = b = nothing
    while True:
        if not a.size:
            a = next(blocks_of_a, nothing)
        if not b.size:
            b = next(blocks_of_b, nothing)
        count = min(a.size, b.size)
        if not count:
            return total
        total += _of_block(a[:count], b[:count])
        a = a[count:]
        b = b[count:]


def _blocks(tensor: LazyTensor, advance: Callable[[int], None]) -> Iterator[Any]:
    """Yield the numbers of each block of a tensor, as a vector."""
    for block in read_blocks(tensor):
        advance(block.nbytes)
        yield numbers(block.reshape(-1), tensor.dtype)


def _of_block(
    a: "np.ndarray[Any, np.dtype[np.float64]]", b: "np.ndarray[Any, np.dtype[np.float64]]"
) -> Moved:
    # Equal infinities and two NaN are no change, although their difference is NaN.
    changed = (a != b) & ~(np.isnan(a) & np.isnan(b))
    count = int(np.count_nonzero(changed))
    with np.errstate(all="ignore"):
        difference = a - b
    finite = np.isfinite(difference)
    kept = a[finite]
    squares = float(np.dot(kept, kept))
    if np.any(changed & ~finite):
        return Moved("", a.size, count, squares, distance=inf, largest=inf)
    difference = difference[finite]
    distance = float(np.dot(difference, difference))
    largest = float(np.abs(difference).max(initial=0.0))
    return Moved("", a.size, count, squares, distance, largest)
