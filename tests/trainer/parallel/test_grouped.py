"""The products of experts on a rank without tokens."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.models.moe import grouped
from megatron_lite.models.moe.grouped import grouped_linear, takes_kernel


class Rows(SimpleNamespace):
    """The properties of a tensor on a GPU."""

    def __len__(self) -> int:
        count: int = self.shape[0]
        return count


@pytest.mark.parametrize(
    ("shape", "out", "dtype", "expected"),
    [
        ((0, 16), 24, torch.bfloat16, False),
        ((1, 16), 24, torch.bfloat16, True),
        ((1, 16), 24, torch.float16, False),
        ((1, 20), 24, torch.bfloat16, False),
        ((1, 16), 20, torch.bfloat16, False),
    ],
)
def test_torchs_grouped_product_gets_what_it_computes(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    out: int,
    dtype: torch.dtype,
    expected: bool,
) -> None:
    """It takes at least one row, bf16, and rows that begin at multiples of 16 bytes."""
    monkeypatch.setattr(grouped, "GROUPED", True)
    x = Rows(shape=shape, is_cuda=True, dtype=dtype)
    assert takes_kernel(x, out) is expected  # type: ignore[arg-type]


def test_experts_without_a_row_have_gradients_of_zero() -> None:
    x = torch.zeros(0, 16, requires_grad=True)
    weights = [torch.randn(32, 16, requires_grad=True) for _ in range(3)]
    made = grouped_linear(x, weights, [0, 0, 0])
    assert made.shape == (0, 32)
    made.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 16)
    for weight in weights:
        assert weight.grad is not None
        assert not weight.grad.any()
