"""An adapter's matrices as native tensors of any naming scheme: B has its weight's rows, A its weight's columns.

The family's table therefore also says how they are fused: B of Megatron's linear_qkv has q, k and v by groups, as the
weight does. DoRA's magnitudes are rows with one column.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from formats.tensor import Box, LazyTensor, Shape
from formats.wording import listing
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import Family, family
from megaconv.model.adapter import (
    AdapterInfo,
    LowRank,
    a_name,
    b_name,
    length_name,
    of_any_expert,
    of_each_expert,
)
from megaconv.model.assembled import Placed, assemble
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, OpenedSource, describe
from megaconv.model.naming import Naming
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.regions import PLAIN, Region
from megaconv.model.table import canonical_shapes


class Pair(NamedTuple):
    """The two matrices of one module, and for DoRA a norm for each row of its weight."""

    weight: NativeTensor
    """The module's weight. B has its rows."""
    a: LazyTensor
    b: LazyTensor
    alpha: float
    name: str
    """The module's name for messages."""
    length: LazyTensor | None = None
    length_rows: NativeTensor | None = None
    """The weight whose rows the norms have, if that isn't the weight of B's rows."""


def adaptable_weights(
    table: Family, config: ModelConfig, naming: Naming
) -> dict[str, NativeTensor]:
    """The weights whose modules can have an adapter, by native name.

    These are linear layers, single experts' layers, and routers.
    """
    shapes = canonical_shapes(table.rows, config)
    found = {}
    for native in unsharded_tensors(table.rows, config, naming):
        is_matrix = native.name.endswith("weight") and len(native.shape) == 2
        is_linear = all(_is_linear(name, shapes) for name in native.parts)
        if native.copy is None and is_matrix and is_linear:
            found[native.name] = native
    return found


def _is_linear(name: str, shapes: Mapping[str, Shape]) -> bool:
    return name.startswith("layers.") and len(shapes[name]) == 2


def is_flipped(weight: NativeTensor) -> bool:
    """True if the model stores this weight as [in, out]."""
    regions: tuple[Region, ...] = next(iter(weight.parts.values()))
    return regions[0].transposed


def sizes(weight: NativeTensor) -> tuple[int, int]:
    """(out, in) of a weight."""
    rows, cols = weight.shape
    return (cols, rows) if is_flipped(weight) else (rows, cols)


def a_tensor(weight: NativeTensor, name: str, canonical: str, rank: int) -> NativeTensor:
    """The matrix A [rank, in] of a module, under this name.

    If the weight is sharded by rows, A is sharded along the rank. Otherwise A is sharded along the columns, as the
    weight is.
    """
    _, ins = sizes(weight)
    parts = {canonical: (Region(Box(0, rank, 0, ins), 0),)}
    return NativeTensor(name, parts, (rank, ins), tp=weight.tp, of_experts=weight.of_experts)


def b_tensor(
    weight: NativeTensor, name: str, canonical: Mapping[str, str], rank: int
) -> NativeTensor:
    """The matrix B [out, rank] of a module, sharded by rows if the weight is sharded at all.

    canonical: the canonical name of B for each weight.
    """
    outs, _ = sizes(weight)
    tp = None if weight.tp is None else 0
    parts = _rows_of(weight, canonical, rank)
    return NativeTensor(
        name, parts, (outs, rank), tp=tp, groups=weight.groups, of_experts=weight.of_experts
    )


def length_tensor(weight: NativeTensor, name: str, canonical: Mapping[str, str]) -> NativeTensor:
    """DoRA's magnitudes [out] of a module."""
    outs, _ = sizes(weight)
    return NativeTensor(
        name,
        _rows_of(weight, canonical, 1),
        (outs,),
        tp=0 if weight.tp == 0 else None,
        groups=weight.groups,
    )


def _rows_of(
    weight: NativeTensor, canonical: Mapping[str, str], cols: int
) -> dict[str, tuple[Region, ...]]:
    """The regions of a tensor that has the weight's rows and `cols` columns."""
    return {
        canonical[part]: tuple(
            _as_rows(region)._replace(box=region.box._replace(col0=0, col1=cols), col=0) for region in regions
        )
        for part, regions in weight.parts.items()
    }  # fmt: skip


def _as_rows(region: Region) -> Region:
    """The same region, with rows of the canonical tensor as rows."""
    return region._replace(row=region.col, order=PLAIN) if region.transposed else region


def part_of(weight: NativeTensor, name: str) -> NativeTensor:
    """One canonical weight of a fused one, as a separate module."""
    rows = sum(region.box.rows for region in weight.parts[name])
    _, ins = sizes(weight)
    parts = {name: (Region(Box(0, rows, 0, ins), 0),)}
    return NativeTensor(weight.name, parts, (rows, ins), tp=weight.tp, of_experts=weight.of_experts)


def of_all_experts(weight: NativeTensor) -> NativeTensor:
    """One expert's weight as the representative of all experts of its layer."""
    return weight._replace(
        parts={of_any_expert(name): regions for name, regions in weight.parts.items()}
    )


class Module(NamedTuple):
    """A module with an adapter, as it is written."""

    weight: NativeTensor
    lows: Mapping[str, LowRank]
    """Adapters by the names of the weight's parts. They share one A, one rank and one alpha."""

    @property
    def low(self) -> LowRank:
        """The adapter of the first part."""
        return next(iter(self.lows.values()))

    def natives(
        self, names: tuple[str, str, str], length_rows: NativeTensor | None = None
    ) -> Iterator[NativeTensor]:
        """The module's tensors under these names. The last name is used only for DoRA."""
        low, (a, b, length) = self.low, names
        yield a_tensor(self.weight, a, low.a, low.rank)
        yield b_tensor(self.weight, b, {part: low.b for part, low in self.lows.items()}, low.rank)
        if low.length:
            rows = length_rows or self.weight
            yield length_tensor(rows, length, {part: low.length for part, low in self.lows.items()})


def module_of(weight: NativeTensor, weights: Mapping[str, LowRank]) -> Module | None:
    """The adapter of a module whose weights all share one A; None if the adapter changes none of them.

    Raises NotExpressible if the weights don't share one A, or if only some of them are changed.
    """
    lows = {name: weights[name] for name in weight.parts if name in weights}
    if not lows:
        return None
    if len(lows) < len(weight.parts) or len({(low.a, low.alpha) for low in lows.values()}) > 1:
        raise NotExpressible(
            f"{weight.name} is one module there, which has one A; the adapter has one for each of {', '.join(lows)}; "
            "merge it into its base (--adapter) instead"
        )
    return Module(weight, lows)


def require_all_written(info: AdapterInfo, written: Collection[str], what: str) -> None:
    """Raises NotExpressible for weights whose adapters the output lacks. what: the reason, for the message."""
    left = [name for name in info.weights if name not in written]
    if left:
        raise NotExpressible(
            f"adapters of {listing(left)}: {what}; merge the adapter into its base (--adapter) instead"
        )


def open_pairs(
    config: ModelConfig,
    pairs: Iterable[Pair],
    *,
    base: str,
    dropout: float,
    source: str,
    where: str,
) -> OpenedSource:
    """An adapter as a source. where: the file, for messages.

    Raises TensorMismatch if matrices don't fit their weight or each other, or if a weight has two adapters.
    """
    weights: dict[str, LowRank] = {}
    placed: list[Placed] = []
    shapes: dict[str, Shape] = {}
    for pair in pairs:
        rank = _rank(pair, where)
        parts = tuple(pair.weight.parts)
        shared_a = a_name(parts)
        found: dict[str, LowRank] = {}
        for part in parts:
            length = "" if pair.length is None else length_name(part)
            found[part] = LowRank(shared_a, b_name(part), rank, pair.alpha, length)
            for name in of_each_expert(part, config.experts.count):
                if name in weights:
                    raise TensorMismatch(
                        f"{where}: {pair.name} changes {name}, which another module does too"
                    )
                weights[name] = found[part]
        natives = Module(pair.weight, found).natives(
            (pair.name, pair.name, pair.name), pair.length_rows
        )
        for native, tensor in zip(natives, (pair.a, pair.b, pair.length), strict=False):
            assert tensor is not None
            shapes |= dict(_shapes(native))
            placed.append(Placed(native, tensor, where))
    if not weights:
        raise TensorMismatch(f"{where}: holds no adapter of a linear layer", code="missing-tensor")
    info = AdapterInfo(weights, base, dropout)
    return adapter_source(config, info, assemble(shapes, placed, strict=True), source)


def adapter_source(
    config: ModelConfig, info: AdapterInfo, found: Mapping[Key, LazyTensor], source: str
) -> OpenedSource:
    """A source of the tensors that an adapter names, in the order of the model's weights."""
    order = {
        name: number
        for number, name in enumerate(canonical_shapes(family(config.family).rows, config))
    }
    ordered = {name: info.weights[name] for name in sorted(info.weights, key=order.__getitem__)}
    names = dict.fromkeys(name for low in ordered.values() for name in low.tensors)
    tensors = {Key(name): found[Key(name)] for name in names}
    header = Header(
        config, describe(tensors), source=source, adapter=replace(info, weights=ordered)
    )
    return OpenedSource(header, tensors)


def _rank(pair: Pair, where: str) -> int:
    outs, ins = sizes(pair.weight)
    a = tuple(pair.a.shape)
    b = tuple(pair.b.shape)
    rank = a[0] if a else 0
    if not rank or a != (rank, ins) or b != (outs, rank):
        raise TensorMismatch(
            f"{where}: {pair.name} has matrices {list(a)} and {list(b)}; "
            f"{pair.weight.name} is {list(pair.weight.shape)}, "
            f"so expected [r, {ins}] and [{outs}, r]",
            code="misshapen-tensor",
        )
    length = pair.length
    if length is not None and tuple(length.shape) != (outs,):
        raise TensorMismatch(
            f"{where}: {pair.name} has magnitudes {list(length.shape)}; expected [{outs}]",
            code="misshapen-tensor",
        )
    return rank


def _shapes(native: NativeTensor) -> Iterator[tuple[str, Shape]]:
    for name, regions in native.parts.items():
        yield name, (sum(region.box.rows for region in regions), *native.shape[1:])
