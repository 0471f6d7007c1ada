"""The matrices of an adapter as native tensors of any naming scheme: B has its weight's rows, A its weight's columns.

So the family's table says how they are fused, too: B of Megatron's linear_qkv has q, k and v by groups as the weight has them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from formats.tensor import Box, LazyTensor, Shape
from megaconv.engine.assembled import Placed, assemble
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import Family
from megaconv.model.adapter import AdapterInfo, LowRank, a_name, b_name
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, OpenedSource, describe
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import Naming
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.regions import Region
from megaconv.model.table import canonical_shapes


class Pair(NamedTuple):
    """The two matrices that one module has."""

    weight: NativeTensor
    """The module's own."""
    a: LazyTensor
    b: LazyTensor
    alpha: float
    name: str
    """For messages."""


def linear_weights(family: Family, config: ModelConfig, naming: Naming) -> dict[str, NativeTensor]:
    """By native name, the weights whose modules can have an adapter: the linear layers outside experts."""
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    shapes = canonical_shapes(family.rows, config)
    natives = native_tensors(family.rows, config, naming, Layout(), 0, whole, config.vocab)
    return {
        native.name: native
        for native in natives
        if native.copy is None
        and native.name.endswith("weight")
        and all(_is_linear(name, shapes) for name in native.parts)
    }


def _is_linear(name: str, shapes: Mapping[str, Shape]) -> bool:
    words = name.split(".")
    return words[0] == "layers" and len(shapes[name]) == 2 and not {"experts", "router"} & set(words)


def is_flipped(weight: NativeTensor) -> bool:
    """Whether the model stores this weight as [in, out]."""
    regions: tuple[Region, ...] = next(iter(weight.parts.values()))
    return regions[0].transposed


def sizes(weight: NativeTensor) -> tuple[int, int]:
    """(out, in)."""
    rows, cols = weight.shape
    return (cols, rows) if is_flipped(weight) else (rows, cols)


def a_tensor(weight: NativeTensor, name: str, canonical: str, rank: int) -> NativeTensor:
    """A [rank, in] of a module under this name. A linear layer that is sharded by rows of its weight has its A sharded along the
    rank, another one as its weight, along the columns."""
    _, ins = sizes(weight)
    return NativeTensor(name, {canonical: (Region(Box(0, rank, 0, ins), 0),)}, (rank, ins), tp=weight.tp)


def b_tensor(weight: NativeTensor, name: str, rank: int) -> NativeTensor:
    """B [out, rank] of a module, sharded by rows wherever the weight is sharded at all."""
    parts = {
        b_name(part): tuple(
            region._replace(
                box=region.box._replace(col0=0, col1=rank), row=region.col if region.transposed else region.row, col=0, transposed=False
            )
            for region in regions
        )
        for part, regions in weight.parts.items()
    }  # fmt: skip
    outs, _ = sizes(weight)
    tp = None if weight.tp is None else 0
    return NativeTensor(name, parts, (outs, rank), tp=tp, groups=weight.groups)


def part_of(weight: NativeTensor, name: str) -> NativeTensor:
    """One canonical weight of a fused one, as a module of its own."""
    rows = sum(region.box.rows for region in weight.parts[name])
    _, ins = sizes(weight)
    return NativeTensor(weight.name, {name: (Region(Box(0, rows, 0, ins), 0),)}, (rows, ins), tp=weight.tp)


def module_of(weight: NativeTensor, info: AdapterInfo) -> LowRank | None:
    """What a module's two matrices are, where all its weights share one A; None where the adapter changes none of them.

    Raises NotExpressible where they don't, or where only some of them are changed.
    """
    found = [info.weights[name] for name in weight.parts if name in info.weights]
    if not found:
        return None
    if len(found) < len(weight.parts) or len({(low.a, low.alpha) for low in found}) > 1:
        raise NotExpressible(
            f"{weight.name} is one module there, which has one A; the adapter has one for each of "
            f"{', '.join(name for name in weight.parts if name in info.weights)}; merge it into its base (--adapter) instead"
        )
    return found[0]


def open_pairs(
    family: Family, config: ModelConfig, pairs: Iterable[Pair], *, base: str, dropout: float, source: str, where: str
) -> OpenedSource:
    """An adapter as a source. where: the file, for messages.

    Raises TensorMismatch for matrices that don't fit their weight or each other, and for a weight with two adapters.
    """
    weights: dict[str, LowRank] = {}
    placed: list[Placed] = []
    shapes: dict[str, Shape] = {}
    for pair in pairs:
        rank = _rank(pair, where)
        names = tuple(pair.weight.parts)
        shared = a_name(names)
        for name in names:
            if name in weights:
                raise TensorMismatch(f"{where}: {pair.name} changes {name}, which another module does too")
            weights[name] = LowRank(shared, b_name(name), rank, pair.alpha)
        for native, tensor in (
            (a_tensor(pair.weight, pair.name, shared, rank), pair.a),
            (b_tensor(pair.weight, pair.name, rank), pair.b),
        ):
            shapes |= dict(_shapes(native))
            placed.append(Placed(native, tensor, where))
    if not weights:
        raise TensorMismatch(f"{where}: holds no adapter of a linear layer", code="missing-tensor")
    found = assemble(shapes, placed, strict=True)
    order = {name: number for number, name in enumerate(canonical_shapes(family.rows, config))}
    ordered = {name: weights[name] for name in sorted(weights, key=order.__getitem__)}
    first = dict.fromkeys(name for low in ordered.values() for name in (low.a, low.b))
    tensors = {Key(name): found[Key(name)] for name in first}
    header = Header(config, describe(tensors), source=source, adapter=AdapterInfo(ordered, base, dropout))
    return OpenedSource(header, tensors)


def _rank(pair: Pair, where: str) -> int:
    outs, ins = sizes(pair.weight)
    a, b = tuple(pair.a.shape), tuple(pair.b.shape)
    if len(a) != 2 or not a[0] or a != (a[0], ins) or b != (outs, a[0]):
        raise TensorMismatch(
            f"{where}: {pair.name} has matrices {list(a)} and {list(b)}; {pair.weight.name} is {list(pair.weight.shape)}, "
            f"so expected [r, {ins}] and [{outs}, r]",
            code="misshapen-tensor",
        )
    return a[0]


def _shapes(native: NativeTensor) -> Iterator[tuple[str, Shape]]:
    for name, regions in native.parts.items():
        yield name, (sum(region.box.rows for region in regions), native.shape[1])
