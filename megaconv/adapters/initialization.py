"""The part of a weight that PiSSA and OLoRA take out of the base before the training.

    PiSSA    U[:, :r] @ diag(S[:r]) @ V[:r], the r largest singular values of the weight
    OLoRA    Q[:, :r] @ R[:r] * scale, the first r columns of Q of the weight's QR decomposition

An adapter holds the trained matrices alone. peft computes this part from the base whenever it loads the adapter, and
subtracts it: weight - part, rounded to the weight's dtype. Then it merges like any LoRA adapter.

peft decomposes in float32. Its last bits depend on the LAPACK library, and even on the number of threads. The part is
computed in float64 here, and is nearer to the exact one. The part of PiSSA is the projection of the weight to its r first
singular vectors, which are eigenvectors of its Gram matrix. The part of OLoRA is the projection to its r first columns.
Source: peft 0.21.2, tuners/lora/layer.py (pissa_init, olora_init).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from formats.lazy_numpy import Doubles, Floats, np
from formats.tensor import Box, Bytes, ComputedTensor, LazyTensor, Shape
from megaconv.adapters.low_rank import product, read_floats
from megaconv.adapters.peft_files import OLORA, Adapter, module_path
from megaconv.adapters.targets import path_of, weights_of
from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.model.assembled import Placed, assemble, window
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Key
from megaconv.model.natives import NativeTensor
from megaconv.model.table import canonical_shapes
from megaconv.values import rounding

_SMALLEST_GAP = 1e-6
"""Smallest difference of two singular values, relative to the larger one, that float32 still tells apart."""
_ROWS_AT_ONCE = 1024
_OF_VOCABULARY = frozenset(("embed.weight", "head.weight"))
_one_at_a_time = Lock()
"""A decomposition uses all processors, and memory for the whole matrix."""

_Factors = tuple[Floats, Floats]
"""([rows, rank], [rank, cols])."""


@dataclass
class _Matrix:
    """A native weight in memory as float32, which receives regions of canonical tensors as a NativeOutput."""

    values: Floats
    itemsize: int = 4

    def write(self, box: Box, rows: Bytes) -> None:
        count, cols = self.values.shape
        np.copyto(window(self.values.view(np.uint8), Box(0, count, 0, cols), box, 4), rows)

    def scratch(self, box: Box) -> Bytes:
        return np.empty((box.rows, box.cols * self.itemsize), np.uint8)


@dataclass
class RemovedPart:
    """The removed part as a native tensor [rows, cols]. Its two factors stay in memory after the first read."""

    native: NativeTensor
    tensors: Mapping[Key, LazyTensor]
    """The base's canonical tensors."""
    factors_of: Callable[[Floats], _Factors]
    where: str
    """The adapter's module, for messages."""
    dtype: str = "float32"
    _factors: _Factors | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def shape(self) -> Shape:
        return self.native.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        with self._lock:
            if self._factors is None:
                with _one_at_a_time:
                    self._factors = self._decomposed()
        left, right = self._factors
        found = product(left[box.row0 : box.row1], right[:, box.col0 : box.col1])
        np.copyto(out, np.ascontiguousarray(found).view(np.uint8))

    def _decomposed(self) -> _Factors:
        weight = self._weight()
        if not np.isfinite(weight).all():
            raise NotExpressible(
                f"{self.where}: the base's {self.native.name} has infinite numbers or NaN, so that its initialization can't be computed"
            )
        try:
            return self.factors_of(weight)
        except _Undetermined as error:
            raise NotExpressible(
                f"{self.where}: {error}, so that peft's initialization differs between machines; "
                "convert the adapter to plain LoRA where it was trained (peft: path_initial_model_for_weight_conversion)"
            ) from None

    def _weight(self) -> Floats:
        """The base's weight [rows, cols]."""
        matrix = _Matrix(np.empty(self.native.shape, np.float32))
        for name, regions in self.native.parts.items():
            for region in regions:
                stored = read_floats(self.tensors[Key(name)], region.box)
                region.order.write(region, region.box, matrix, stored.view(np.uint8))
        return matrix.values


class _Undetermined(ArithmeticError):
    """A decomposition that rounding errors decide."""


def principal(weight: Floats, rank: int) -> _Factors:
    """([rows, rank], [rank, cols]) whose product is the part of PiSSA: that of the largest singular values.

    Raises _Undetermined if the singular values `rank` and `rank + 1` are equal.
    """
    is_wide = weight.shape[0] < weight.shape[1]
    tall = weight.T if is_wide else weight
    squares, vectors = np.linalg.eigh(_gram(tall))  # ascending
    singular = np.sqrt(np.maximum(squares[::-1], 0))
    last = singular[rank - 1]
    following = singular[rank] if rank < len(singular) else 0.0
    is_noise = last <= np.finfo(np.float32).eps * singular[0]
    is_close = last - following < _SMALLEST_GAP * last
    if is_close and not is_noise:
        raise _Undetermined(f"the singular values {rank} and {rank + 1} are equal")
    largest_first = vectors[:, ::-1]
    right = np.ascontiguousarray(largest_first[:, :rank])
    left = _in_blocks(tall, right)
    return _ordered(left, right.T, is_wide)


def leading(weight: Floats, rank: int, scale: float) -> _Factors:
    """([rows, rank], [rank, cols]) whose product is the part of OLoRA: the projection to the first columns, times scale.

    Raises _Undetermined if the first `rank` columns depend on each other.
    """
    q, r = np.linalg.qr(weight[:, :rank].astype(np.float64))
    lengths = np.abs(np.diagonal(r))
    if lengths.min() < _SMALLEST_GAP * lengths.max() or not lengths.max():
        raise _Undetermined(f"the first {rank} columns depend on each other")
    right = _in_blocks(np.ascontiguousarray(weight.T), q).T
    return _ordered(scale * q, right, False)


def _ordered(left: Any, right: Any, is_flipped: bool) -> _Factors:
    pair = (right.T, left.T) if is_flipped else (left, right)
    first, second = (np.ascontiguousarray(each, np.float32) for each in pair)
    return first, second


def _gram(tall: Floats) -> Doubles:
    """tall.T @ tall in float64."""
    found = np.zeros((tall.shape[1],) * 2)
    for row in range(0, len(tall), _ROWS_AT_ONCE):
        block = tall[row : row + _ROWS_AT_ONCE].astype(np.float64)
        found += block.T @ block
    return found


def _in_blocks(left: Floats, right: Doubles) -> Doubles:
    """left @ right in float64."""
    blocks = [
        left[row : row + _ROWS_AT_ONCE].astype(np.float64) @ right
        for row in range(0, len(left), _ROWS_AT_ONCE)
    ]
    return np.concatenate(blocks)


@dataclass(frozen=True)
class Remainder(ComputedTensor):
    """A weight without its removed part, rounded to the weight's dtype.

    A read raises NotExpressible if a finite number would become infinite, as it does in peft.
    """

    removed: LazyTensor
    name: str
    """The weight's name for messages."""

    def read_into(self, box: Box, out: Bytes) -> None:
        values = read_floats(self.source, box) - read_floats(self.removed, box)
        try:
            rounded = rounding.rounded(values, self.dtype, overflow=False)
        except rounding.BeyondRange:
            raise NotExpressible(
                f"{self.name}: without the part that the adapter's initialization took out, numbers are infinite in {self.dtype}; "
                "give --dtype float32"
            ) from None
        np.copyto(out, rounded.reshape(out.shape))


def removed_parts(
    adapter: Adapter,
    weight: float,
    family: Family,
    config: ModelConfig,
    tensors: Mapping[Key, LazyTensor],
) -> dict[str, LazyTensor]:
    """The removed part of each weight by canonical name. Empty for an adapter that didn't change its base.

    weight: the factor of the adapter. config: the merged model's. tensors: the base's canonical tensors.
    Raises NotExpressible for a module whose initialization isn't known.
    """
    kind = adapter.config.initialization
    if not kind:
        return {}
    if weight != 1:
        raise NotExpressible(
            f"{adapter.weights}: init_lora_weights {kind!r} took a part out of the base, which the whole adapter replaces; give no weight"
        )
    if (config.hf or {}).get("quantization_config"):
        raise NotExpressible(
            f"{adapter.weights}: init_lora_weights {kind!r} took a part out of a base that isn't quantized; give this base"
        )
    shapes = canonical_shapes(family.rows, config)
    found: dict[str, LazyTensor] = {}
    for module, native in weights_of(adapter, family, config):
        # peft initializes adapters of embeddings as in plain LoRA, and stores the remainder of a head in the adapter.
        is_whole = module_path(module.module) + ".weight" in adapter.replaced
        if module.embedding or is_whole:
            continue
        where = f"{adapter.weights}: {module.module}"
        path = path_of(module, native, adapter.config)
        rank = adapter.config.rank_of(path)
        is_tied = native.parts.keys() <= _OF_VOCABULARY and Key("head.weight") not in tensors
        if is_tied or not _is_known(native, kind, rank):
            raise NotExpressible(
                f"{where}: init_lora_weights {kind!r} is computed for untied weights of linear layers alone, whose sizes are no less "
                "than the rank; merge it with peft"
            )
        decomposition = _decomposition(kind, rank, adapter.config.scale_of(path, rank))
        part = RemovedPart(native, tensors, decomposition, where)
        own = {name: shapes[name] for name in native.parts}
        parts = assemble(own, [Placed(native, part, where)], strict=True)
        found |= {key.name: lazy for key, lazy in parts.items()}
    return found


def _is_known(native: NativeTensor, kind: str, rank: int) -> bool:
    """True for a linear layer. peft's OLoRA decomposes Conv1D's [in, out] as if it were [out, in]."""
    regions = next(iter(native.parts.values()))
    is_linear = len(native.shape) == 2 and not (kind == OLORA and regions[0].transposed)
    return is_linear and rank <= min(native.shape)


def _decomposition(kind: str, rank: int, scale: float) -> Callable[[Floats], _Factors]:
    if kind == OLORA:
        return lambda weight: leading(weight, rank, scale)
    return lambda weight: principal(weight, rank)
