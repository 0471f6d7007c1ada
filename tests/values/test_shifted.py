"""Norm weights that Megatron stores minus 1: the remedy for a weight that its dtype can't hold in this form."""

import pytest
import torch

from megaconv.errors import NotExpressible
from megaconv.values.shifted import add_or_refuse


@pytest.mark.parametrize(
    ("dtype", "number", "remedy"),
    [
        ("bfloat16", -1, "convert it with --dtype float32, or --transformer-impl local"),
        ("bfloat16", 1, "convert it with --dtype float32, or --allow-lossy out_norm"),
        # No dtype is wider.
        ("float32", -1, "convert it with --transformer-impl local"),
    ],
)
def test_a_weight_without_an_exact_shifted_value_is_refused_with_a_remedy(
    dtype: str, number: int, remedy: str
) -> None:
    weight = torch.tensor([[0.1]], dtype=getattr(torch, dtype)).view(torch.uint8).numpy()
    with pytest.raises(NotExpressible, match=f"{dtype} has no exact value; {remedy}"):
        add_or_refuse(weight, dtype, number, "norm.weight")
