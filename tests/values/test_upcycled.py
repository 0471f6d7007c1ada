"""Parts of matrices, and the weights of a new router."""

import numpy as np
import pytest
import torch

from formats.tensor import Box, LazyTensor, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.values.upcycled import DEVIATION, PartTensor, RouterTensor


def as_torch(tensor: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(read_tensor(tensor)).reshape(-1))
    return made.view(dtype).reshape(tensor.shape)


def test_a_router_has_uniform_weights_of_one_deviation() -> None:
    made = as_torch(RouterTensor((64, 300), "float32", "layers.0.mlp.router.weight"), torch.float32)
    assert abs(made.std() - DEVIATION) < 0.02 * DEVIATION
    assert abs(made.mean()) < 0.02 * DEVIATION
    assert made.abs().max() <= DEVIATION * 3**0.5
    other = as_torch(
        RouterTensor((64, 300), "float32", "layers.1.mlp.router.weight"), torch.float32
    )
    assert abs(torch.corrcoef(torch.stack([made.flatten(), other.flatten()]))[0, 1]) < 0.03


def test_the_weights_of_a_router_are_those_of_all_machines() -> None:
    found = as_torch(RouterTensor((2, 3), "float64", "layers.0.mlp.router.weight"), torch.float64)
    expected = [
        [-0.009853536991556661, 0.011228843836225867, -0.023853305470138565],
        [0.03289009562404068, -0.03126806123114194, -0.029866526985705206],
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_experts_of_one_mlp_have_equal_rows(dtype: str) -> None:
    made = as_torch(RouterTensor((6, 5), dtype, "r", parts=3), getattr(torch, dtype))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[2], made[3])
    plain = as_torch(RouterTensor((2, 5), dtype, "r"), getattr(torch, dtype))
    assert torch.equal(made[::3], plain)


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_part_is_some_rows_and_columns_times_a_number(dtype: torch.dtype, factor: int) -> None:
    stored = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    part = PartTensor(as_lazy(stored), Box(3, 7, 2, 6), "w", factor)
    expected = (stored[3:7, 2:6].double() * factor).to(dtype)
    assert torch.equal(as_torch(part, dtype), expected)


def test_every_rectangle_is_that_of_the_whole() -> None:
    stored = as_lazy(torch.randn(9, 8, generator=torch.Generator().manual_seed(0)))
    made: list[LazyTensor] = [
        PartTensor(stored, Box(1, 8, 2, 7), "w", 3),
        RouterTensor((7, 5), "float32", "r", 2),
    ]
    draw = np.random.default_rng(0)
    for tensor in made:
        whole = read_tensor(tensor)
        for _ in range(50):
            row0, row1 = sorted(draw.integers(0, 8, 2))
            col0, col1 = sorted(draw.integers(0, 6, 2))
            found = np.empty((row1 - row0, 4 * (col1 - col0)), np.uint8)
            tensor.read_into(Box(row0, row1, col0, col1), found)
            assert np.array_equal(found, whole[row0:row1, 4 * col0 : 4 * col1])


def test_a_product_beyond_the_range_is_refused() -> None:
    stored = torch.full((2, 2), 60000.0, dtype=torch.float16)
    part = PartTensor(as_lazy(stored), Box(0, 1, 0, 1), "layers.0.mlp.experts.1.down.weight", 2)
    with pytest.raises(NotExpressible, match=r"experts\.1\.down\.weight: 2 times a weight"):
        read_tensor(part)


@pytest.mark.filterwarnings("error")
def test_every_kind_of_nan_stays_one_without_a_warning() -> None:
    signalling = torch.tensor([[0x7F81, 0x3F80]], dtype=torch.int32).to(torch.int16)
    part = PartTensor(as_lazy(signalling.view(torch.bfloat16)), Box(0, 1, 0, 2), "w", 2)
    made = as_torch(part, torch.bfloat16)
    assert made[0, 0].isnan()
    assert made[0, 1] == 2
