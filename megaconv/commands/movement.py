"""How far a model has moved from another: of every tensor, and of every layer, the relative size of the difference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from formats.tensor import LazyTensor
from megaconv.engine.fingerprints import read_blocks
from megaconv.engine.rounding import numbers
from megaconv.engine.shifted import plain
from megaconv.model.ir import WEIGHT, Key, Source
from megaconv.threads import thread_pool


@dataclass(frozen=True)
class Moved:
    """Sums over elements; those that are no finite number on either side are left out."""

    name: str
    elements: int = 0
    changed: int = 0
    squares: float = 0.0
    """Of A."""
    distance: float = 0.0
    """Squares of the difference."""
    largest: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of A."""
        return sqrt(self.distance / self.squares) if self.squares else (0.0 if not self.distance else float("inf"))

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            self.name, self.elements + other.elements, self.changed + other.changed, self.squares + other.squares,
            self.distance + other.distance, max(self.largest, other.largest),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        relative = self.relative if self.relative != float("inf") else None
        return {"elements": self.elements, "changed": self.changed, "relative": relative, "max_abs": self.largest}


@dataclass(frozen=True)
class Movement:
    tensors: tuple[Moved, ...]
    """Those that both sides have in the same shape, in model order."""

    def layers(self) -> list[Moved]:
        """Summed up by layer; what is in none stands for itself."""
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
        """For people: a bar for each layer. blocks: whether the terminal can show block characters."""
        layers = self.layers()
        width = max((len(layer.name) for layer in layers), default=0)
        most = max((layer.relative for layer in layers if layer.relative != float("inf")), default=0.0) or 1.0
        yield f"{'moved':<{width}}  {'|A-B|/|A|':>10}  {'largest':>9}  changed"
        for layer in layers:
            bar = ("█" if blocks else "#") * round(30 * min(1.0, layer.relative / most))
            share = f"{100 * layer.changed / max(1, layer.elements):.1f}%"
            yield f"{layer.name:<{width}}  {layer.relative:>10.3e}  {layer.largest:>9.3g}  {share:>7}  {bar}".rstrip()


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.attn.q.weight`."""
    words = name.split(".")
    numbered = next((at for at, word in enumerate(words) if word.isdecimal()), None)
    return name if numbered is None else ".".join(words[: numbered + 1])


def movement(
    left: Source, right: Source, workers: int, advance: Callable[[int], None] = lambda count: None
) -> Movement:
    """Reads the weights of both. Their dtypes may differ."""
    ours, theirs = ({key: tensor for key, tensor in side.tensors() if key.slot == WEIGHT} for side in (left, right))
    keys = [key for key, tensor in ours.items() if key in theirs and tuple(theirs[key].shape) == tuple(tensor.shape)]
    with thread_pool(workers) as pool:
        return Movement(tuple(pool.map(lambda key: _moved(key, ours[key], theirs[key], advance), keys)))


def _moved(key: Key, left: LazyTensor, right: LazyTensor, advance: Callable[[int], None]) -> Moved:
    left, right = plain(key, left), plain(key, right)
    total = Moved(key.name)
    a, b = np.empty(0), np.empty(0)
    # Blocks are of as many bytes, so of other numbers of elements where the dtypes differ: what is left over waits.
    mine, others = read_blocks(left), read_blocks(right)
    while True:
        if not a.size and (block := next(mine, None)) is not None:
            advance(block.nbytes)
            a = numbers(block.reshape(-1), left.dtype)
        if not b.size and (block := next(others, None)) is not None:
            b = numbers(block.reshape(-1), right.dtype)
        count = min(a.size, b.size)
        if not count:
            return total
        total += _of_block(a[:count], b[:count])
        a, b = a[count:], b[count:]


def _of_block(a: "np.ndarray[Any, np.dtype[np.float64]]", b: "np.ndarray[Any, np.dtype[np.float64]]") -> Moved:
    with np.errstate(all="ignore"):
        difference = a - b
    finite = np.isfinite(difference)
    difference = difference[finite]
    changed = int(np.count_nonzero(difference)) + int(np.count_nonzero(~finite))
    largest = float(np.abs(difference).max(initial=0.0))
    kept = a[finite]
    return Moved("", a.size, changed, float(np.dot(kept, kept)), float(np.dot(difference, difference)), largest)
