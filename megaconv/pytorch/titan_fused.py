"""The optimizer state of torchtitan's fused q, k and v, as the state of the three weights that its checkpoints hold.

A fused parameter has the rows of each key/value head together: the group's q heads, then k, then v.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.lazy_numpy import Bytes
from formats.tensor import Box, LazyTensor, Shape
from megaconv.errors import TensorMismatch
from megaconv.pytorch.stored_optimizer import StoredOptimizer

_FUSED = re.compile(r"(.*\.attention\.(?:qkv_linear\.)?)wqkv\.(weight|bias)")


@dataclass(frozen=True)
class GroupedRows:
    """A matrix or vector of some rows of each group of rows of another one."""

    whole: LazyTensor
    first: int
    """The first row in each group."""
    count: int
    """Number of rows in each group."""
    period: int
    """Number of rows of a group in the other matrix."""

    @property
    def shape(self) -> Shape:
        rows, *columns = self.whole.shape
        return (rows // self.period * self.count, *columns)

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        """Fill the buffer, a range of rows of the other matrix at a time."""
        row = box.row0
        while row < box.row1:
            group, inner = divmod(row, self.count)
            count = min(self.count - inner, box.row1 - row)
            start = group * self.period + self.first + inner
            wanted = box._replace(row0=start, row1=start + count)
            self.whole.read_into(wanted, out[row - box.row0 : row - box.row0 + count])
            row += count


def separated(
    stored: StoredOptimizer, weights: Mapping[str, LazyTensor], kv_heads: int
) -> StoredOptimizer:
    """The optimizer with the state of q, k and v apart. weights: the model's, by name. Raises TensorMismatch."""
    fused = [name for name in stored.group_of if _FUSED.fullmatch(name) and name not in weights]
    if not fused:
        return stored
    group_of = {
        inner: number
        for name, number in stored.group_of.items()
        for inner in (_names(name) if name in fused else [name])
    }
    slots = {
        slot: dict(_slot(held, fused, weights, kv_heads)) for slot, held in stored.slots.items()
    }
    return replace(stored, slots=slots, group_of=group_of)


def _slot(
    held: Mapping[str, LazyTensor],
    fused: list[str],
    weights: Mapping[str, LazyTensor],
    kv_heads: int,
) -> Iterator[tuple[str, LazyTensor]]:
    for name, tensor in held.items():
        if name in fused:
            yield from _parts(name, tensor, weights, kv_heads)
        else:
            yield name, tensor


def _parts(
    name: str, whole: LazyTensor, weights: Mapping[str, LazyTensor], kv_heads: int
) -> Iterator[tuple[str, LazyTensor]]:
    names = _names(name)
    missing: Any = [each for each in names if each not in weights]
    if missing:
        raise TensorMismatch(
            f"{name}: has optimizer state, and the checkpoint has no {missing[0]}",
            code="missing-tensor",
        )
    rows = [weights[each].shape[0] for each in names]
    expected = (sum(rows), *weights[names[0]].shape[1:])
    if tuple(whole.shape) != expected:
        raise TensorMismatch(
            f"{name}: its optimizer state is {list(whole.shape)}, expected {list(expected)} for {kv_heads} key/value heads"
        )
    first, period = 0, sum(rows) // kv_heads
    for each, count in zip(names, rows, strict=True):
        yield each, GroupedRows(whole, first, count // kv_heads, period)
        first += count // kv_heads


def _names(fused: str) -> list[str]:
    """The names of q, k and v."""
    found = _FUSED.fullmatch(fused)
    assert found is not None, fused
    return [f"{found[1]}{each}.{found[2]}" for each in ("wq", "wk", "wv")]
