"""bf16 attention of few queries on a processor without bf16: float32 in inference, torch's own bits in training."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models import attention
from megatron_lite.models.attention import FEW_QUERIES, sdpa


@pytest.fixture(autouse=True)
def _without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "lacks_bf16", lambda device: True)


def rows(queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [queries, 2, 4, 8], k and v [20, 2, 2, 8] in bf16."""
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(queries, 2, 4, 8, generator=generator)
    k, v = torch.randn(2, 20, 2, 2, 8, generator=generator)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    in_heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(*in_heads, enable_gqa=True).permute(2, 0, 1, 3)


def test_few_queries_are_computed_in_float32() -> None:
    q, k, v = rows(2)
    with torch.inference_mode():
        found = sdpa(q, k, v, None, 0.0)
    assert torch.equal(found, torchs(q.float(), k.float(), v.float()).bfloat16())


@pytest.mark.parametrize("queries", [2, FEW_QUERIES + 1])
def test_training_and_many_queries_have_the_bits_of_torch(queries: int) -> None:
    q, k, v = rows(queries)
    with torch.inference_mode(queries > FEW_QUERIES):
        assert torch.equal(sdpa(q, k, v, None, 0.0), torchs(q, k, v))
