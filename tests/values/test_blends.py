"""Blends of tensors along an arc and by differences, against plain computations with torch and numpy."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from formats.tensor import Box, LazyTensor, matrix_shape, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.options.averaging import AverageMethod
from megaconv.values.averaged import AveragedTensor
from megaconv.values.blending import blend_of
from megaconv.values.blends import Run
from megaconv.values.random_numbers import uniform

NAME = "layers.0.attn.q.weight"


def drawn(seed: int, shape: tuple[int, ...] = (37, 53), scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def blended(
    tensors: Sequence[torch.Tensor], chosen: AverageMethod, shares: Sequence[float]
) -> AveragedTensor:
    lazy: list[LazyTensor] = [as_lazy(each) for each in tensors]
    return AveragedTensor(lazy[0], lazy[1:], blend_of(chosen, shares, lazy, NAME), NAME)


def as_torch(tensor: AveragedTensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(read_tensor(tensor)).reshape(-1).view(np.uint8))
    return made.view(dtype).reshape(tensor.shape)


def kept_of(difference: torch.Tensor, density: float) -> torch.Tensor:
    """The difference with zeros in place of all but its largest elements."""
    flat = difference.flatten()
    kept = torch.zeros_like(flat)
    chosen = flat.abs().float().topk(max(1, int(density * flat.numel()))).indices
    kept[chosen] = flat[chosen]
    return kept.view_as(difference)


def elected(kept: torch.Tensor, weights: torch.Tensor, *, averages: bool) -> torch.Tensor:
    """The election of signs of TIES. kept [differences, ...], already weighted."""
    sign = torch.where(kept.sum(0) >= 0, 1.0, -1.0)
    agrees = kept.sign() == sign
    total = (kept * agrees).sum(0)
    divisor = (weights * agrees).sum(0)
    return total / divisor.where(divisor > 0, 1.0) if averages else total


@pytest.mark.parametrize("place", [0.0, 0.3, 1.0, 1.5])
def test_slerp_keeps_to_the_arc(place: float) -> None:
    first, second = drawn(0), drawn(1, scale=3)
    a, b = first / first.norm(), second / second.norm()
    angle = torch.acos((a * b).sum())
    expected = torch.sin((1 - place) * angle) * first + torch.sin(place * angle) * second
    made = as_torch(blended((first, second), AverageMethod("slerp"), (1 - place, place)))
    torch.testing.assert_close(made, expected / torch.sin(angle), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, -1.0, 0.0])
def test_slerp_of_tensors_of_one_direction_is_a_line(factor: float) -> None:
    first = drawn(0)
    made = as_torch(blended((first, first * factor), AverageMethod("slerp"), (0.75, 0.25)))
    expected = 0.75 * first + 0.25 * factor * first
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_an_arc_is_the_same_wherever_two_tensors_have_equal_parts() -> None:
    first = drawn(0, (4096, 64))  # several blocks
    second = torch.cat((first[:2048], drawn(1, (2048, 64))))
    made = as_torch(blended((first, second), AverageMethod("slerp"), (0.5, 0.5)))
    ratio = made[:2048] / first[:2048]
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))
    assert ratio[0, 0] > 1.01


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
def test_ties_is_the_mean_of_the_largest_elements_of_the_sign_that_prevails(density: float) -> None:
    base, *others = (drawn(seed) for seed in range(4))
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).view(3, 1, 1)
    kept = torch.stack([kept_of(other - base, density) for other in others]) * weights
    made = as_torch(
        blended((base, *others), AverageMethod("ties", density), weights.flatten().tolist())
    )
    torch.testing.assert_close(made, base + elected(kept, weights, averages=True))


def test_ties_keeps_all_elements_of_the_least_magnitude_that_is_kept() -> None:
    base, other = torch.zeros(8), torch.tensor([1.0, -1.0, 1.0, 0.5, 3.0, 0.5, 0.0, 2.0])
    made = as_torch(blended((base, other), AverageMethod("ties", 0.4), (1.0,)), torch.float32)
    assert made.tolist() == [1.0, -1.0, 1.0, 0.0, 3.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("method", ["dare", "dare-ties"])
def test_dare_keeps_elements_at_random_and_scales_them(method: str) -> None:
    base, *others = (drawn(seed, (200, 300)) for seed in range(3))
    chosen = AverageMethod(method, 0.2, seed=7)
    separate = [as_torch(blended((base, base, each), chosen, (1.0, 1.0))) for each in others]
    for made, other in zip(separate, others, strict=True):
        kept = made != base
        assert kept.double().mean().item() == pytest.approx(0.2, abs=0.01)
        torch.testing.assert_close(made[kept], (base + (other - base) / 0.2)[kept])
    first = as_torch(blended((base, others[0], base), chosen, (1.0, 1.0)))
    both = as_torch(blended((base, *others), chosen, (1.0, 0.5)))
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64).view(2, 1, 1)
    kept = torch.stack((first - base, separate[1] - base)) * weights
    expected = elected(kept, weights, averages=False) if method == "dare-ties" else kept.sum(0)
    torch.testing.assert_close(both, base + expected)


def test_the_random_elements_depend_on_seed_and_number_alone() -> None:
    base, other = drawn(0), drawn(1)

    def kept(seed: int, *tensors: torch.Tensor) -> torch.Tensor:
        weights = (1.0,) * (len(tensors) - 1)
        return as_torch(blended(tensors, AverageMethod("dare", 0.5, seed), weights)) != base

    assert torch.equal(kept(0, base, other), kept(0, base, other * 2))
    assert not torch.equal(kept(0, base, other), kept(1, base, other))
    assert not torch.equal(kept(0, base, other, base), kept(0, base, base, other))


@pytest.mark.parametrize("method", ["slerp", "ties", "dare", "dare-ties"])
def test_a_part_of_a_blend_is_the_part_of_the_whole(method: str) -> None:
    tensors = [drawn(seed, (64, 40), scale=0.02).to(torch.bfloat16) for seed in range(2)]
    density = None if method == "slerp" else 0.3
    shares = (0.5, 0.5) if method == "slerp" else (1.0,)
    made = blended(tensors, AverageMethod(method, density), shares)
    whole = as_torch(made, torch.bfloat16)
    part = np.empty((5, 2 * 7), np.uint8)
    made.read_into(Box(3, 8, 11, 18), part)
    assert torch.equal(torch.from_numpy(part).view(torch.bfloat16), whole[3:8, 11:18])


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("method", ["ties", "dare", "dare-ties"])
def test_a_part_of_many_models_is_the_part_of_the_whole_to_the_last_bit(
    method: str, width: int
) -> None:
    tensors = [drawn(seed, (64, 40)) for seed in range(11)]
    weights = (1.0, 0.1, 0.7, 1 / 3, 2.3, 0.9, 1.7, 0.6, 1.1, 0.3)
    made = blended(tensors, AverageMethod(method, 1.0), weights)
    whole = as_torch(made)
    rows = 1 if width == 1 else 5
    for col in range(40 - width):
        part = np.empty((rows, 8 * width), np.uint8)
        made.read_into(Box(3, 3 + rows, col, col + width), part)
        expected = whole[3 : 3 + rows, col : col + width]
        assert torch.equal(torch.from_numpy(part).view(torch.float64), expected)


@pytest.mark.parametrize("method", ["slerp", "ties", "dare", "dare-ties"])
def test_equal_models_are_their_own_blend(method: str) -> None:
    """Also NaN with its bits, infinite and the largest numbers, and integers."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    chosen = AverageMethod(method, None if method == "slerp" else 0.3)
    shares = (0.3, 0.7) if method == "slerp" else (1.0,)
    made = as_torch(blended([bits.reshape(256, 256)] * 2, chosen, shares), torch.bfloat16)
    assert torch.equal(made.view(torch.int16).flatten(), bits.view(torch.int16))
    counted = torch.arange(6)
    assert torch.equal(as_torch(blended([counted] * 2, chosen, shares), torch.int64), counted)


@pytest.mark.parametrize("method", ["ties", "dare", "dare-ties"])
def test_a_number_that_is_not_finite_stays_one(method: str) -> None:
    base, other = torch.zeros(4), torch.tensor([1.0, torch.nan, torch.inf, 0.0])
    made = as_torch(blended((base, other), AverageMethod(method, 1.0), (1.0,)), torch.float32)
    assert made[0] == 1
    assert made[1].isnan()
    assert not made[2].isfinite()
    assert made[3] == 0


def test_places_count_through_the_whole_tensor() -> None:
    rows, columns = matrix_shape((3, 5, 7))
    whole = Run(Box(0, rows, 0, columns), 0, rows * columns, columns).places()
    assert whole.tolist() == list(range(105))
    inner = Run(Box(2, 4, 3, 6), 1, 5, columns).places()
    assert inner.tolist() == [18, 19, 24, 25]


def test_the_random_numbers_are_uniform_and_independent() -> None:
    found = uniform(np.arange(1 << 16, dtype=np.uint64), "a text")
    counts = np.bincount((found * 16).astype(int), minlength=16)
    assert np.abs(counts - 4096).max() < 4 * 4096**0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert found.min() >= 0
    assert found.max() < 1
