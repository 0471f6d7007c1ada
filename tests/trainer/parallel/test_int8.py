"""Products in int8: near the product in float64 for any activations, and of each row alone."""

import pytest
import torch
from torch import Tensor

from megatron_lite.products import int8_kernels
from megatron_lite.products.int8 import Int8Matrix, Int8Product, quantize
from megatron_lite.products.int8_kernels import has_int8_products

pytestmark = pytest.mark.skipif(
    not has_int8_products(), reason="this torch has no int8 kernel for this processor"
)
OUT, IN = 37, 210


@pytest.fixture(autouse=True, params=["fbgemm", "onednn"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with both kernels, whatever the processor has."""
    monkeypatch.setattr(int8_kernels, "has_int8_sums", lambda: request.param == "onednn")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(x: Tensor, matrix: Int8Matrix) -> Tensor:
    """The product of activations with the rounded matrix, in float64."""
    plain = matrix.values.double() * matrix.scales.double().unsqueeze(1)
    return x.double() @ plain.t()


def product(x: Tensor, matrix: Int8Matrix) -> Tensor:
    return Int8Product(matrix).linear(x, torch.empty(*matrix.values.shape, device="meta"))


def test_weights_are_within_half_a_step_of_their_row() -> None:
    weights = normal(OUT, IN) * torch.logspace(-6, 6, OUT).unsqueeze(1)
    weights[5] = 0
    rounded = quantize(weights)
    step = weights.abs().amax(1, keepdim=True) / 127
    assert bool(((rounded.plain() - weights).abs() <= step * 0.5001).all())
    assert rounded.values.abs().max() == 127
    assert quantize(rounded.plain()).values.equal(rounded.values)


@pytest.mark.parametrize("rows", [1, 2, 16, 600])
def test_activations_count_to_14_bits_also_beside_a_large_one(rows: int) -> None:
    x = normal(rows, IN)
    x[:, 3] *= 1000
    x[0, 3] = 0
    matrix = quantize(normal(OUT, IN))
    # Half a step of the fine part in each of the row's numbers.
    step = x.double().abs().amax(1, keepdim=True) / (63 * 126) / 2
    bound = step * matrix.plain().double().abs().sum(1)
    found = product(x, matrix)
    assert bool(((found - exact(x, matrix)).abs() <= bound * 1.01).all())


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((2, 512), 5.0)
    x[1] = -5.0
    matrix = Int8Matrix(torch.full((16, 512), 127, dtype=torch.int8), torch.ones(16))
    torch.testing.assert_close(product(x, matrix).double(), exact(x, matrix))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, matrix = normal(16, IN), quantize(normal(OUT, IN))
    x[3] *= 1e6
    together = product(x, matrix)
    for number in range(len(x)):
        assert product(x[number : number + 1], matrix).equal(together[number : number + 1])


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x, matrix = normal(4, IN), quantize(normal(OUT, IN))
    x[1, 7], x[2, 8] = torch.nan, torch.inf
    found = product(x, matrix)
    assert found.isfinite().all(1).tolist() == [True, False, False, True]


def test_axes_dtype_bias_and_no_rows() -> None:
    matrix, bias = quantize(normal(OUT, IN)), normal(OUT).bfloat16()
    x = normal(3, 2, IN).bfloat16()
    made = Int8Product(matrix).linear(x, torch.empty(0), bias)
    expected = exact(x.flatten(0, 1), matrix).view(3, 2, OUT) + bias
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), expected, atol=0.2, rtol=0.01)
    assert product(x[:0], matrix).shape == (0, 2, OUT)
    assert product(torch.zeros(2, IN), matrix).equal(torch.zeros(2, OUT))
