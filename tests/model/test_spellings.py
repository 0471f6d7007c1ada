"""Each way to store a tensor: what it writes, that reading is the inverse of writing, block by block, on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from loaders.legacy import EveryNthRow
from megaconv.engine.coverage import multiplicity
from megaconv.model.assembled import Placed, assemble, overlap, window
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.layout import Layout
from megaconv.model.natives import NativeTensor
from megaconv.model.patterns import evaluate, expand
from megaconv.model.pieces import of_expert
from megaconv.model.rank import Rank
from megaconv.model.regions import PLAIN, Order, Region, Repeated
from megaconv.model.rows import Row, Spelling
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.spellings.rotary_pairs import AsPairs
from megaconv.model.spellings.transposed import AS_COLUMNS
from megaconv.model.table import (
    AsVector,
    Fused,
    FusedPairs,
    Halves,
    HeadPairs,
    LastRowsApart,
    OtherAxis,
    PerHead,
    RopeLast,
    RotaryPairs,
    RowParts,
    SecondHalfFirst,
    Shifted,
    Stacked,
    StackedTransposed,
    Transposed,
)

Draw = st.DrawFn
Numbers = NDArray[np.uint32]
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


@dataclass
class Memory:
    """A native tensor in memory, to write to and to read from."""

    shape: Shape
    dtype: str
    data: Bytes = field(init=False)
    times: NDArray[np.int64] = field(init=False)
    """The number of times that each byte was written."""

    def __post_init__(self) -> None:
        rows, cols = matrix_shape(self.shape)
        self.data = np.zeros((rows, cols * self.itemsize), np.uint8)
        self.times = np.zeros(self.data.shape, np.int64)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def write(self, box: Box, rows: Bytes) -> None:
        place = self._place(box)
        self.data[place] = rows
        self.times[place] += 1

    def read_into(self, box: Box, out: Bytes) -> None:
        np.copyto(out, self.data[self._place(box)])

    def scratch(self, box: Box) -> Bytes:
        return np.full((box.rows, box.cols * self.itemsize), 0xEE, np.uint8)

    def _place(self, box: Box) -> tuple[slice, slice]:
        rows, cols = matrix_shape(self.shape)
        assert 0 <= box.row0 <= box.row1 <= rows, box
        assert 0 <= box.col0 <= box.col1 <= cols, box
        return slice(box.row0, box.row1), slice(box.col0 * self.itemsize, box.col1 * self.itemsize)


def random_matrix(rows: int, cols: int, dtype: str) -> Bytes:
    return np.random.default_rng(rows * 1000 + cols).integers(
        0, 256, (rows, cols * ITEMSIZE[dtype]), np.uint8
    )


def written(
    native: Memory, region: Region, values: Bytes, blocks: Iterator[Box], whole: Box
) -> None:
    """Write a region from blocks of the canonical tensor. values: the whole tensor, whose rectangle is `whole`."""
    for block in blocks:
        wanted = overlap(region.box, block)
        if wanted is not None:
            region.order.write(
                region, wanted, native, window(values, whole, wanted, native.itemsize)
            )


# Orders: one region.


class Case(NamedTuple):
    region: Region
    native: Shape
    canonical: Shape
    dtype: str


@st.composite
def regions(draw: Draw, orders: st.SearchStrategy[Order]) -> Case:
    """A region at any place of a canonical and a native tensor that have a margin around it."""
    order = draw(orders)
    rows, cols = order.together * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if isinstance(order, Repeated):
        rows = 1
    row0, col0, row, col = (draw(st.integers(0, 2)) for _ in range(4))
    region = Region(Box(row0, row0 + rows, col0, col0 + cols), row, col, order)
    filled = list(order.filled(region))
    native = (
        max(box.row1 for box in filled) + draw(st.integers(0, 1)),
        max(box.col1 for box in filled) + 1,
    )
    return Case(
        region,
        native,
        (row0 + rows + 1, col0 + cols + 1),
        draw(st.sampled_from(list(DTYPES.values()))),
    )


ORDERS = {
    "plain": st.just(PLAIN),
    "as columns": st.just(AS_COLUMNS),
    "as pairs": st.builds(AsPairs, st.sampled_from([2, 4, 6])),
    "as halves": st.just(AsHalves()),
    "every n-th row": st.builds(EveryNthRow, st.integers(1, 3)),
    "repeated": st.builds(Repeated, st.integers(1, 3)),
}


@pytest.mark.parametrize("kind", ORDERS)
@given(data=st.data())
def test_an_order_reads_back_the_elements_that_it_wrote_in_any_blocks(
    kind: str, data: st.DataObject
) -> None:
    region, native_shape, shape, dtype = data.draw(regions(ORDERS[kind]))
    whole = Box(0, shape[0], 0, shape[1])
    values, native = random_matrix(*shape, dtype), Memory(native_shape, dtype)
    written(native, region, values, box_blocks(whole, dtype, data.draw(st.integers(1, 64))), whole)
    for block in box_blocks(region.box, dtype, data.draw(st.integers(1, 64))):
        found = np.zeros((block.rows, block.cols * native.itemsize), np.uint8)
        region.order.read(region, block, native, found)
        assert np.array_equal(found, window(values, whole, block, native.itemsize))


@pytest.mark.parametrize("kind", ORDERS)
@given(data=st.data())
def test_an_order_fills_what_it_says_once(kind: str, data: st.DataObject) -> None:
    region, native_shape, shape, dtype = data.draw(regions(ORDERS[kind]))
    whole = Box(0, shape[0], 0, shape[1])
    native = Memory(native_shape, dtype)
    written(native, region, random_matrix(*shape, dtype), box_blocks(whole, dtype, 7), whole)
    expected = np.zeros(native_shape, np.int64)
    for box in region.order.filled(region):
        expected[box.row0 : box.row1, box.col0 : box.col1] += 1
    assert np.array_equal(native.times[:, :: native.itemsize], expected)
    assert multiplicity(list(region.order.filled(region)), *native_shape)[1] == 1


def rows_as(order: Order, count: int) -> list[int]:
    """The canonical rows in the order of the native tensor."""
    region = Region(Box(0, count, 0, 1), 0, order=order)
    values, last = (
        np.arange(count, dtype=np.uint8).reshape(-1, 1),
        max(box.row1 for box in order.filled(region)),
    )
    native = Memory((last, 1), "uint8")
    order.write(region, region.box, native, values)
    return [int(value) for value in native.data[:, 0]]


@pytest.mark.parametrize(
    ("order", "count", "expected"),
    [
        (PLAIN, 4, [0, 1, 2, 3]),
        (AsPairs(4), 8, [0, 2, 1, 3, 4, 6, 5, 7]),
        (AsPairs(2), 4, [0, 1, 2, 3]),
        (AsHalves(), 6, [0, 2, 4, 1, 3, 5]),
        (EveryNthRow(2), 3, [0, 0, 1, 0, 2]),
        (Repeated(3), 1, [0, 0, 0]),
    ],
)
def test_the_rows_lie_in_this_order(order: Order, count: int, expected: list[int]) -> None:
    assert rows_as(order, count) == expected


# Spellings: a row's tensors on all ranks.

SIZES = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 6,
    "ffn": 4,
    "moe_ffn": 4,
    "experts": 4,
    "vocab": 16,
}
SHARDED = {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "moe_ffn": "etp"}
INDEXER = {"index_heads": 3, "index_dim": 6, "rope_dim": 4}
QKV = ("heads*head_dim hidden", "kv_heads*head_dim hidden", "kv_heads*head_dim hidden")


class Way(NamedTuple):
    """A row with a spelling."""

    spelling: Spelling
    canonical: str = "{q|k|v}"
    shapes: tuple[str, ...] = QKV
    tp: int | None = 0
    ranks: tuple[int, ...] = (1, 2)


EXPERTS = {"canonical": "{e}.{gate|up}", "shapes": ("moe_ffn hidden",) * 2}
HEADS = {"canonical": "q", "shapes": ("heads*head_dim hidden",), "ranks": (1, 2, 4)}
INDEX = {"canonical": "index", "shapes": ("index_heads*index_dim hidden",), "tp": None}

WAYS: Mapping[str, Way] = {
    "plain": Way("{q|k|v}"),
    "plain, sharded by columns": Way("{a|b}", "{a|b}", ("hidden ffn",) * 2, tp=1, ranks=(1, 2, 4)),
    "biases": Way(Fused("qkv", groups="kv_heads"), shapes=("heads*head_dim", *["kv_heads*head_dim"] * 2)),
    "a number": Way("scale", "scale", ("",), tp=None),
    "a convolution": Way("conv", "conv", ("heads*head_dim 1 3",)),
    "as vectors": Way(AsVector("{q|k}"), "{q|k}", ("1 1 heads*head_dim 1", "1 heads*head_dim 1 1"), tp=2),
    "fused": Way(Fused("qkv")),
    "fused by groups": Way(Fused("qkv", groups="kv_heads"), ranks=(1, 2, 4)),
    "fused in part": Way((Fused("q_k", groups="kv_heads", members=(0, 1)), "v")),
    "transposed": Way(Transposed("qkv")),
    "rotary pairs": Way(RotaryPairs("{q|k|v}", rotating=(0, 1))),
    "fused rotary pairs": Way(FusedPairs("qkv", groups="kv_heads", rotating=(0, 1)), ranks=(1, 2)),
    "halves": Way(Halves("{q|k|v}")),
    "head pairs": Way(HeadPairs("{q|k|v}"), ranks=(1,)),
    "halves of experts": Way(Halves("{e}.{gate|up}"), **EXPERTS),
    "second half first": Way(SecondHalfFirst("join"), "join", ("hidden 2*hidden",)),
    "per head": Way(PerHead("q"), **HEADS),
    "per head, transposed": Way(PerHead("q", transposed=True), **HEADS),
    "rope last": Way(RopeLast("index", halves=False), **INDEX),
    "rope last in pairs": Way(RopeLast("index", halves=True), **INDEX),
    "last rows apart": Way(LastRowsApart("first", rest="last", rows="hidden"), "embed", ("vocab hidden",)),
    "halves of rows apart": Way(LastRowsApart("first", rest="last"), "embed", ("vocab hidden",)),
    "parts of rows": Way(RowParts("embed.{p}", parts="kv_heads", whole="embed"), "embed", ("vocab hidden",), tp=None, ranks=(1,)),
    "parts of rows, counted after others": Way(
        RowParts("embed.{p}", parts="kv_heads", first="heads"), "embed", ("vocab hidden",), tp=None, ranks=(1,)
    ),
    "another axis": Way(OtherAxis("embed", tp=1), "embed", ("vocab hidden",)),
    "shifted": Way(Shifted("norm", by=-1), "norm", ("hidden",), tp=None),
    "experts": Way("{e}.{gate|up}", **EXPERTS),
    "fused experts": Way(Fused("{e}.fc1"), **EXPERTS),
    "stacked": Way(Stacked("fc1"), **EXPERTS),
    "stacked as rows": Way(Stacked("fc1", "local_experts*2*moe_ffn hidden"), **EXPERTS),
    "stacked transposed": Way(StackedTransposed("fc1", "local_experts hidden 2*moe_ffn"), **EXPERTS),
}  # fmt: skip


def ranks_of(tp: int) -> Iterator[Rank]:
    """All ranks of a layout that shards experts as the other tensors, and over two expert-parallel ranks."""
    layout = Layout(tp=tp, etp=tp, ep=2)
    whole = SIZES | INDEXER
    own = {
        name: max(1, size // layout.sizes()[SHARDED[name]]) if name in SHARDED else size
        for name, size in whole.items()
    }
    own["local_experts"] = SIZES["experts"] // layout.ep
    for ep_rank in range(layout.ep):
        for tp_rank in range(tp):
            yield Rank(layout, whole, own, tp_rank, ep_rank, etp_rank=tp_rank)


def natives(row: Row, rank: Rank) -> Iterator[NativeTensor]:
    for template in row.templates(row.names["hf"], rank):
        if not template.each_expert:
            yield template.native
            continue
        for local, expert in enumerate(rank.experts):
            yield of_expert(template.native, str(local), str(expert))


def row_of(way: Way) -> Row:
    return Row(way.canonical, way.shapes, tp=way.tp, hf=way.spelling)


def tensors_of(row: Row, dtype: str) -> dict[str, tuple[Shape, Bytes]]:
    """Random canonical tensors: (shape, matrix) by name."""
    found = {}
    for pattern, written_shape in zip(expand(row.canonical), row.shapes, strict=True):
        shape = evaluate(written_shape, SIZES | INDEXER)
        for name in (
            pattern.replace("{e}", str(expert))
            for expert in range(SIZES["experts"] if row.of_experts else 1)
        ):
            found[name] = shape, random_matrix(*matrix_shape(shape), dtype) ^ np.uint8(len(found))
    return found


def stored(
    native: NativeTensor, tensors: Mapping[str, tuple[Shape, Bytes]], dtype: str, block_bytes: int
) -> Memory:
    """A native tensor, written from blocks of the canonical ones."""
    memory = Memory(native.view or matrix_shape(native.shape), dtype)
    assert prod(memory.shape) == prod(native.shape), native.name
    for name, own in native.parts.items():
        rows, cols = matrix_shape(tensors[name][0])
        whole = Box(0, rows, 0, cols)
        for region in own:
            written(memory, region, tensors[name][1], box_blocks(whole, dtype, block_bytes), whole)
    return memory


def placed(native: NativeTensor, memory: Memory) -> Placed:
    """The native tensor as a file holds it: in its declared shape."""
    rows, cols = matrix_shape(native.shape)
    stored_so = Memory(native.shape, memory.dtype)
    stored_so.data = memory.data.reshape(rows, cols * memory.itemsize)
    return Placed(native, stored_so, "a file")


@pytest.mark.parametrize(
    ("name", "tp"), [(name, tp) for name, way in WAYS.items() for tp in way.ranks]
)
@given(
    dtype=st.sampled_from(list(DTYPES.values())),
    block_bytes=st.integers(1, 400),
    read_bytes=st.integers(1, 400),
)
def test_tensors_written_by_all_ranks_are_read_back_unchanged(
    name: str, tp: int, dtype: str, block_bytes: int, read_bytes: int
) -> None:
    row = row_of(WAYS[name])
    tensors = tensors_of(row, dtype)
    found = list[Placed]()
    for rank in ranks_of(tp):
        if row.of_experts or rank.ep_rank == 0:
            for native in natives(row, rank):
                memory = stored(native, tensors, dtype, block_bytes)
                assert (memory.times == 1).all(), f"{native.name}: written twice, or never"
                found.append(placed(native, memory))
    lazy = assemble({name: shape for name, (shape, _) in tensors.items()}, found, strict=True)
    for tensor, (_, expected) in tensors.items():
        assert np.array_equal(read(lazy[Key(tensor, WEIGHT)], read_bytes), expected), tensor


def read(tensor: LazyTensor, block_bytes: int) -> Bytes:
    rows, cols = matrix_shape(tensor.shape)
    whole, itemsize = Box(0, rows, 0, cols), ITEMSIZE[tensor.dtype]
    found = np.zeros((rows, cols * itemsize), np.uint8)
    for block in box_blocks(whole, tensor.dtype, block_bytes):
        tensor.read_into(block, window(found, whole, block, itemsize))
    return found


# What a single rank holds, in plain numpy.


def numbered(row: Row) -> dict[str, tuple[Shape, Bytes]]:
    """Canonical tensors whose elements are all different."""
    found, start = {}, 0
    for name, (shape, _) in tensors_of(row, "float32").items():
        numbers = np.arange(start, start + prod(shape), dtype=np.uint32).reshape(
            matrix_shape(shape)
        )
        found[name] = shape, numbers.view(np.uint8)
        start += prod(shape)
    return found


def only(name: str) -> tuple[NativeTensor, Numbers, dict[str, Numbers]]:
    """(the first native tensor of the only tensor-parallel rank, its elements, the canonical elements)."""
    row = row_of(WAYS[name])
    tensors = numbered(row)
    first = next(natives(row, next(ranks_of(1))))
    made = stored(first, tensors, "float32", 64).data.view(np.uint32).reshape(first.shape)
    return (
        first,
        made,
        {name: values.view(np.uint32).reshape(shape) for name, (shape, values) in tensors.items()},
    )


def test_fused_tensors_lie_below_each_other() -> None:
    _, made, canonical = only("fused")
    assert np.array_equal(made, np.concatenate([canonical["q"], canonical["k"], canonical["v"]]))


def test_axes_of_size_1_are_left_out() -> None:
    native, made, canonical = only("as vectors")
    assert native.shape == (16,)
    assert np.array_equal(made, canonical["q"].reshape(16))


def test_groups_have_an_equal_share_of_each_tensor() -> None:
    native, made, canonical = only("fused by groups")
    groups = [canonical[name].reshape(2, -1, 6) for name in "qkv"]
    assert native.groups == 2
    assert np.array_equal(made, np.concatenate(groups, axis=1).reshape(-1, 6))


def test_transposed_tensors_lie_side_by_side() -> None:
    _, made, canonical = only("transposed")
    assert np.array_equal(made, np.concatenate([canonical[name].T for name in "qkv"], axis=1))


def test_rotary_pairs_interleave_the_halves_of_a_head() -> None:
    _, made, canonical = only("rotary pairs")
    heads = canonical["q"].reshape(4, 2, 2, 6)
    assert np.array_equal(made, heads.swapaxes(1, 2).reshape(-1, 6))


def test_halves_are_the_even_rows_and_the_odd_rows() -> None:
    _, made, canonical = only("halves")
    assert np.array_equal(made, np.concatenate([canonical["q"][::2], canonical["q"][1::2]]))


def test_pairs_of_heads_are_all_first_heads_and_all_second_heads() -> None:
    sizes, row = SIZES | {"heads": 8, "kv_heads": 4}, row_of(WAYS["head pairs"])
    q = next(natives(row, Rank(Layout(), sizes, sizes, 0, 0, 0)))
    places = [(region.box.row0, region.row) for region in q.parts["q"]]
    assert places == [(0, 0), (8, 16), (16, 8), (24, 24)]


def test_the_second_half_of_the_columns_comes_first() -> None:
    _, made, canonical = only("second half first")
    assert np.array_equal(made, np.roll(canonical["join"], 6, axis=1))


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_have_an_axis_of_their_own(transposed: bool) -> None:
    _, made, canonical = only("per head, transposed" if transposed else "per head")
    heads = canonical["q"].reshape(4, 4, 6)
    assert np.array_equal(made, heads.swapaxes(1, 2) if transposed else heads)


def test_rotating_rows_come_last() -> None:
    _, made, canonical = only("rope last")
    heads = canonical["index"].reshape(3, 6, 6)
    assert np.array_equal(made, heads[:, [4, 5, 0, 1, 2, 3]].reshape(-1, 6))
    _, made, canonical = only("rope last in pairs")
    heads = canonical["index"].reshape(3, 6, 6)
    assert np.array_equal(made, heads[:, [4, 5, 0, 2, 1, 3]].reshape(-1, 6))


def test_experts_are_stacked() -> None:
    _, made, canonical = only("stacked")
    experts = [np.concatenate([canonical[f"{e}.gate"], canonical[f"{e}.up"]]) for e in (0, 1)]
    assert np.array_equal(made, experts)
    _, made, _ = only("stacked transposed")
    assert np.array_equal(made, [expert.T for expert in experts])


def test_a_shift_is_noted_and_changes_no_order() -> None:
    native, made, canonical = only("shifted")
    assert native.shift == -1
    assert np.array_equal(made, canonical["norm"])


def test_another_axis_is_sharded_in_this_naming_scheme_alone() -> None:
    row = row_of(WAYS["another axis"])
    shards = [native for rank in ranks_of(2) if rank.ep_rank == 0 for native in natives(row, rank)]
    assert row.tp == 0
    assert [(native.tp, native.shape) for native in shards] == [(1, (16, 3))] * 2
