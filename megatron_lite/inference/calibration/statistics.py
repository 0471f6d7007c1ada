"""Merges what the ranks have seen, and names it as the Hugging Face model names its matrices."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from formats.lazy_numpy import Floats
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.table import canonical_shapes
from megaconv.values.calibration import (
    CHANNEL_AMAX,
    CHANNEL_MEAN,
    CHANNEL_SQUARE,
    INPUT_AMAX,
    K_AMAX,
    V_AMAX,
)
from megatron_lite.inference.calibration.recording import CachedAmax, Inputs, Matrix

_CACHED = ((".attn.k.weight", K_AMAX), (".attn.v.weight", V_AMAX))
"""Weights that make keys and values -> their statistic, in the order of a cache."""
Vector = NDArray[np.float64]


@dataclass
class WholeColumns:
    """Statistics of all columns of a matrix, merged over ranks that hold some of them."""

    amax: Vector
    total: Vector
    squares: Vector
    rows: Vector

    @classmethod
    def of(cls, cols: int) -> "WholeColumns":
        return cls(np.zeros(cols), np.zeros(cols), np.zeros(cols), np.zeros(cols))

    def add(self, seen: "SeenColumns") -> None:
        """Add the columns that one rank has seen."""
        place = slice(seen.first, seen.first + len(seen.amax))
        np.maximum(self.amax[place], seen.amax, out=self.amax[place])
        self.total[place] += seen.total
        self.squares[place] += seen.squares
        self.rows[place] += seen.rows

    @property
    def mean(self) -> Floats:
        """float32 [in]: the mean of |x|."""
        return (self.total / np.maximum(self.rows, 1)).astype(np.float32)

    @property
    def mean_square(self) -> Floats:
        """float32 [in]: the mean of x^2."""
        return (self.squares / np.maximum(self.rows, 1)).astype(np.float32)


class SeenColumns(NamedTuple):
    """The columns that one rank has seen of a matrix."""

    first: int
    """The first column of this rank."""
    amax: Vector
    total: Vector
    squares: Vector
    rows: int


@dataclass
class Merged:
    """The statistics of all ranks together."""

    columns: dict[str, WholeColumns] = field(default_factory=dict)
    """By canonical tensor."""
    cached: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Layer -> the largest key and the largest value."""

    def named(self, natives: Iterable[NativeTensor]) -> dict[str, Floats]:
        """The statistics by the names of a calibration. A matrix that saw no token has none."""
        found: dict[str, Floats] = {}
        for native in natives:
            module = native.name.removesuffix(".weight")
            columns = self.columns.get(next(iter(native.parts)))
            if columns is not None and columns.rows.min() > 0:
                amax = columns.amax.astype(np.float32)
                found[f"{module}.{INPUT_AMAX}"] = amax.max(keepdims=True).reshape(())
                found[f"{module}.{CHANNEL_AMAX}"] = amax
                found[f"{module}.{CHANNEL_MEAN}"] = columns.mean
                found[f"{module}.{CHANNEL_SQUARE}"] = columns.mean_square
            found |= self._largest_cached(native)
        return found

    def _largest_cached(self, native: NativeTensor) -> dict[str, Floats]:
        """The largest key and value that a matrix makes, by name."""
        found: dict[str, Floats] = {}
        for place, (end, name) in enumerate(_CACHED):
            for part in native.parts:
                layer = _layer_of(part)
                if part.endswith(end) and layer in self.cached:
                    largest: Floats = np.array(self.cached[layer][place], np.float32)
                    found[f"{native.name.removesuffix('.weight')}.{name}"] = largest
        return found


def _layer_of(name: str) -> int:
    words = name.split(".")
    return int(words[1]) if words[0] == "layers" else -1


def hugging_face_matrices(config: ModelConfig) -> list[NativeTensor]:
    """The matrices [out, in] of the Hugging Face model."""
    chunk = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = native_tensors(
        family(config.family).rows, config, HF, Layout(), 0, chunk, config.vocab
    )
    return [
        native
        for native in natives
        if native.copy is None and native.name.endswith(".weight") and len(native.shape) == 2
    ]


def merged(config: ModelConfig, found: list[Matrix], inputs: Inputs, cached: CachedAmax) -> Merged:
    """The statistics of all ranks, on every rank. Collective."""
    rows = family(config.family).rows
    shapes = canonical_shapes(rows, config)
    result = Merged()
    own = _columns(found, inputs), _cached(cached)
    for columns, largest in gathered(own):
        for name, seen in columns.items():
            cols = shapes[name][1]
            whole = result.columns.setdefault(name, WholeColumns.of(cols))
            whole.add(seen)
        for layer, each in largest.items():
            before = result.cached.get(layer, each)
            result.cached[layer] = tuple(map(max, before, each))
    return result


def gathered(own: Any) -> list[Any]:
    """The objects of all ranks, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _columns(found: list[Matrix], inputs: Inputs) -> dict[str, SeenColumns]:
    """The statistics of this rank, by canonical tensor."""
    result: dict[str, SeenColumns] = {}
    for matrix in found:
        seen = inputs.found.get(matrix.name)
        if seen is not None:
            sums = (seen.amax.double(), seen.total, seen.squares)
            amax, total, squares = (each.cpu().numpy() for each in sums)
            for name, regions in matrix.info.native.parts.items():
                first = regions[0].box.col0
                result[name] = SeenColumns(first, amax, total, squares, seen.rows)
    return result


def _cached(cached: CachedAmax) -> dict[int, tuple[float, ...]]:
    return {layer: tuple(map(float, each)) for layer, each in cached.found.items()}
