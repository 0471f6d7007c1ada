"""The arithmetic of an average of tensors, against torch's in float64."""

import numpy as np
import pytest
import torch

from formats.tensor import Box, LazyTensor, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.values.averaged import AveragedTensor
from megaconv.values.blends import WeightedSum

SHAPE = (37, 53)
SHARES = (0.5, 0.8, -0.3)


def lazy(tensor: torch.Tensor) -> LazyTensor:
    return as_lazy(tensor)


def drawn(seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale).to(dtype)


def averaged(
    tensors: list[torch.Tensor], shares: tuple[float, ...], *, overflow: bool = False
) -> AveragedTensor:
    first, *others = map(lazy, tensors)
    return AveragedTensor(
        first, tuple(others), WeightedSum(shares), "layers.0.attn.q.weight", overflow
    )


def as_torch(tensor: AveragedTensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(read_tensor(tensor)).reshape(-1).view(np.uint8))
    return made.view(dtype).reshape(SHAPE)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_the_average_is_torchs_sum_in_float64(dtype: torch.dtype) -> None:
    tensors = [drawn(seed, dtype, 0.02) for seed in range(3)]
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    for tensor, share in zip(tensors, SHARES, strict=True):
        expected += tensor.double() * share
    assert torch.equal(as_torch(averaged(tensors, SHARES), dtype), expected.to(dtype))


def test_models_of_other_dtypes_are_rounded_once_to_the_firsts() -> None:
    tensors = [drawn(0, torch.bfloat16), drawn(1, torch.float32), drawn(2, torch.float16)]
    expected = sum(tensor.double() * share for tensor, share in zip(tensors, SHARES, strict=True))
    assert isinstance(expected, torch.Tensor)
    made = as_torch(averaged(tensors, SHARES), torch.bfloat16)
    assert torch.equal(made, expected.to(torch.bfloat16))


def test_a_part_of_the_average_is_the_part_of_the_whole() -> None:
    tensors = [drawn(seed, torch.bfloat16) for seed in range(3)]
    made = averaged(tensors, SHARES)
    whole = np.ascontiguousarray(read_tensor(made)).view(np.uint8).reshape(SHAPE[0], -1)
    part = np.empty((5, 2 * 7), np.uint8)
    made.read_into(Box(3, 8, 11, 18), part)
    assert np.array_equal(part, whole[3:8, 22:36])


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_models_have_themselves_as_their_average(count: int) -> None:
    """Also numbers whose thirds aren't exact, NaN with its bits, and the largest numbers."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    tensors = [bits.reshape(256, 256)] * count
    made = averaged(tensors, (1 / count,) * count)
    assert np.array_equal(read_tensor(made).reshape(-1).view(np.int16), bits.view(torch.int16))


def test_integers_that_differ_have_no_average() -> None:
    same = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    half = (0.5, 0.5)
    assert torch.equal(as_torch(averaged([same, same], half), torch.int64), same)
    with pytest.raises(TensorMismatch, match=r"layers\.0\.attn\.q\.weight: is int64 and differs"):
        read_tensor(averaged([same, same + 1], half))


def test_a_number_that_becomes_infinite_is_refused_with_what_to_do() -> None:
    large = torch.full(SHAPE, 60000.0, dtype=torch.float16)
    beyond = [-large, large], (-1.0, 2.0)
    with pytest.raises(NotExpressible, match=r"beyond the range of float16; give --dtype float32"):
        read_tensor(averaged(*beyond))
    assert torch.isinf(as_torch(averaged(*beyond, overflow=True), torch.float16)).all()


def test_a_sum_beyond_float64_is_refused_too() -> None:
    large = torch.full(SHAPE, 1.5e308, dtype=torch.float64)
    beyond = [-large, large], (-1.0, 2.0)
    with pytest.raises(NotExpressible, match=r"beyond the range of float64; give smaller shares"):
        read_tensor(averaged(*beyond))
    assert torch.isinf(as_torch(averaged(*beyond, overflow=True), torch.float64)).all()
    with pytest.raises(NotExpressible, match=r"beyond the range of float64; give smaller shares"):
        read_tensor(averaged([torch.zeros(SHAPE), large], (-1.0, 2.0)))


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_numbers_that_were_not_finite_before_are_kept(number: float) -> None:
    first, second = drawn(0, torch.float64), drawn(1, torch.float64)
    first[0, 0] = number
    made = as_torch(averaged([first, second], (0.5, 0.5)), torch.float64)
    assert not made[0, 0].isfinite()
    assert made.isfinite().sum() == made.numel() - 1
