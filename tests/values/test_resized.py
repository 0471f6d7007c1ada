"""Tensors with other rows at their end."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from formats.tensor import Box, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.values.resized import ResizedTensor


def resized(
    tensor: torch.Tensor,
    rows: int,
    pieces: Mapping[int, Sequence[int]] | None = None,
    *,
    zero: bool = False,
) -> ResizedTensor:
    return ResizedTensor(as_lazy(tensor), rows, pieces or {}, zero)


def as_torch(tensor: ResizedTensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(read_tensor(tensor)).reshape(-1))
    return made.view(dtype).reshape(tensor.shape)


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(11, 6), (11,), (11, 1), (3000, 70)])
def test_new_rows_are_the_mean_of_all(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    stored = drawn(*shape, dtype=dtype)
    made = as_torch(resized(stored, shape[0] + 2), dtype)
    assert torch.equal(made[:-2], stored)
    mean = stored.double().mean(0)
    assert torch.equal(made[-1], made[-2])
    within = torch.finfo(dtype).eps * mean.abs() + 1e-15
    if dtype == torch.float16:
        within += torch.finfo(dtype).smallest_normal
    assert ((made[-1].double() - mean).abs() <= within).all()


def test_new_rows_are_means_of_their_pieces() -> None:
    stored = drawn(9, 4, dtype=torch.float32)
    made = as_torch(resized(stored, 12, {9: [1, 5, 5], 11: [2]}), torch.float32)
    pieces = stored[[1, 5, 5]].double().mean(0).float()
    assert torch.equal(made[9], pieces)
    assert torch.equal(made[11], stored[2])
    assert torch.equal(made[10], stored.double().mean(0).float())


def test_new_rows_may_be_zero_and_rows_may_go() -> None:
    stored = drawn(9, 4, dtype=torch.bfloat16)
    made = as_torch(resized(stored, 11, zero=True), torch.bfloat16)
    assert torch.equal(made, torch.cat([stored, torch.zeros(2, 4, dtype=torch.bfloat16)]))
    assert torch.equal(as_torch(resized(stored, 3), torch.bfloat16), stored[:3])


def test_each_rectangle_is_that_of_the_whole() -> None:
    made = resized(drawn(9, 5, dtype=torch.float32), 14, {10: [3, 4]})
    whole = read_tensor(made)
    draw = np.random.default_rng(0)
    for _ in range(200):
        row0, row1 = sorted(draw.integers(0, 15, 2))
        col0, col1 = sorted(draw.integers(0, 6, 2))
        found = np.empty((row1 - row0, 4 * (col1 - col0)), np.uint8)
        made.read_into(Box(row0, row1, col0, col1), found)
        assert np.array_equal(found, whole[row0:row1, 4 * col0 : 4 * col1])


def test_the_mean_of_the_largest_numbers_is_finite() -> None:
    largest = torch.full((3000, 1), 65504.0, dtype=torch.float16)
    assert as_torch(resized(largest, 3001), torch.float16)[3000] == 65504


@pytest.mark.filterwarnings("error")
def test_every_kind_of_nan_gives_one_without_a_warning() -> None:
    signalling = torch.tensor([[0x7F81], [0x3F80]], dtype=torch.int32).to(torch.int16)
    made = as_torch(resized(signalling.view(torch.bfloat16), 3), torch.bfloat16)
    assert made[2].isnan().all()
    assert made[1] == 1
