"""Keys and values of tokens that went through the model before, so that the next ones need not compute them again."""

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """What a pass may carry. Key j is always that of position j; who asks for it sees up to its own position."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these among them, up to the last one: [keys, batch, heads, width], as k and v are.

        k, v: [new tokens, batch, heads, width] at the positions of the pass; v may be of another width. Rows may be of different
        lengths: what lies beyond a row's last position is never looked at, but has to be finite.
        """


class ContiguousCache:
    """One tensor a layer for keys and one for values, as long as the longest row may become. All rows grow alike."""

    def __init__(self, length: int) -> None:
        """length: the most tokens that a row will have."""
        self.length = length
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._used: dict[int, int] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError where there is no room. As Cache says, for positions that go on where the last ones ended."""
        start = self._used.get(layer, 0)
        end = start + len(k)
        if end > self.length:
            raise ValueError(f"{end} tokens don't fit into a cache of {self.length}")
        if layer not in self._kept:
            self._kept[layer] = tuple(x.new_zeros(self.length, *x.shape[1:]) for x in (k, v))  # type: ignore[assignment]
        for whole, new in zip(self._kept[layer], (k, v), strict=True):
            whole[start:end] = new
        self._used[layer] = end
        keys, values = self._kept[layer]
        return keys[:end], values[:end]
