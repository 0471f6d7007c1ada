"""Flattened tensors, against an independent way to put them together and against Megatron's own."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import safetensors, torch_dist
from formats.chunked import Chunk, ChunkedTensor, require_cover
from formats.errors import CorruptCheckpoint
from formats.flattened import narrowed, unflatten
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, read_tensor
from tests.conftest import FIXTURES
from tests.strategies import Draw

OLD = sorted(path.name for path in FIXTURES.glob("dist-v0.*-llama-*"))


@pytest.mark.parametrize("name", OLD)
def test_megatrons_flattened_optimizer_state_is_read_bit_for_bit(name: str) -> None:
    opened = torch_dist.open_directory(next((FIXTURES / name).glob("iter_*")))
    tensors, expected = opened.tensors(), safetensors.read(FIXTURES / name / "expected.safetensors")
    for slot in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in {
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        }.items():
            key = f"optimizer.state.{slot}.decoder.layers.{ours}"
            tensor = tensors[key]
            whole = (
                unflatten(tensor, opened.metadata.flattened[key])
                if key in opened.metadata.flattened
                else tensor
            )
            require_cover(key, whole.shape, [chunk[:2] for chunk in whole.chunks])
            for layer, found in enumerate(whole.unstack()):
                wanted = expected[f"{slot}.model.layers.{layer}.{theirs}"]
                assert found.shape == wanted.shape
                assert np.array_equal(read_tensor(found), read_tensor(wanted)), (key, layer)


@settings(deadline=None)
# (number of shards, size of a shard) for each axis.
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3), st.data())
def test_runs_of_elements_become_rectangles_that_cover_the_tensor(
    axes: list[tuple[int, int]], data: st.DataObject
) -> None:
    cuts, local = (tuple(axis) for axis in zip(*axes, strict=True))
    shape, elements = tuple(count * size for count, size in axes), prod(local)
    chunks = []
    for place in np.ndindex(*cuts):
        at = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=3))})
        for start, stop in pairwise(at):
            chunks.append(Chunk.whole((*place, start), (1,) * len(cuts) + (stop - start,), None))  # type: ignore[arg-type]
    whole = unflatten(ChunkedTensor((*cuts, elements), "float32", chunks), shape)
    require_cover("whole", shape, [chunk[:2] for chunk in whole.chunks])


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="flattened"):
        unflatten(ChunkedTensor((2, 1, 7), "float32", []), (4, 3))


# Vectors that hold one parameter after another.

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@dataclass(frozen=True)
class Held:
    """A chunk in memory's place: a tensor in a file (formats.chunked.Stored)."""

    held: FileTensor

    def tensor(self) -> LazyTensor:
        return self.held


@st.composite
def cuts(draw: Draw, length: int) -> list[int]:
    """The places at which `length` elements are cut."""
    return [
        0,
        *sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) - {length}),
        length,
    ]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> InputFile:
    """0, 1, 2 ... as float32."""
    path = tmp_path_factory.mktemp("flat") / "numbers"
    np.arange(4096, dtype=np.float32).tofile(path)
    return InputFile.open(path)


def vector(numbers: InputFile, edges: list[int]) -> ChunkedTensor:
    chunks = [
        Chunk.whole(
            (first,),
            (last - first,),
            Held(FileTensor(numbers, 4 * first, (last - first,), "float32")),
        )
        for first, last in pairwise(edges)
    ]
    return ChunkedTensor((edges[-1],), "float32", chunks)


def array(tensor: LazyTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return read_tensor(tensor).view(np.float32).reshape(tensor.shape)


@given(shape=SHAPES, before=st.integers(0, 9), after=st.integers(0, 9), data=st.data())
def test_a_parameter_is_found_in_a_vector_however_that_is_cut(
    numbers: InputFile, shape: Shape, before: int, after: int, data: st.DataObject
) -> None:
    size = int(np.prod(shape))
    flat = vector(numbers, data.draw(cuts(before + size + after)))
    wanted = np.arange(before, before + size, dtype=np.float32).reshape(shape)
    assert np.array_equal(array(narrowed(flat, before, shape)), wanted)
    assert np.array_equal(array(narrowed(vector(numbers, [0, 4096]), before, shape)), wanted)


def test_a_range_beyond_the_end_of_a_vector_is_refused(numbers: InputFile) -> None:
    with pytest.raises(CorruptCheckpoint, match="elements 10 to 13"):
        narrowed(vector(numbers, [0, 7, 12]), 10, (3,))
