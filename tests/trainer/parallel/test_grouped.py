"""The products of experts on a rank without tokens."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.models.moe import grouped
from megatron_lite.models.moe.grouped import grouped_linear, takes_kernel


class Rows(SimpleNamespace):
    """The properties of a tensor on a GPU."""

    def __len__(self) -> int:
        count: int = self.rows
        return count


@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [(0, torch.bfloat16, False), (1, torch.bfloat16, True), (1, torch.float16, False)],
)
def test_torchs_grouped_product_never_gets_no_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr(grouped, "GROUPED", True)
    x = Rows(rows=rows, is_cuda=True, dtype=dtype)
    assert takes_kernel(x) is expected  # type: ignore[arg-type]


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
