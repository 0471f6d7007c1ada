"""Products and norms that are computed in other ways than PyTorch's own are what PyTorch's are, and so are their gradients."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron_lite.parallel.tensor import rms_normalize
from megatron_lite.products import product
from megatron_lite.products.processor import lacks_bf16
from megatron_lite.products.product import IN_FLOAT32, TURNED_ROUND, TURNED_ROUND_IN_TILES, linear


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def compare(own: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
    along = torch.randn_like(own)
    for mine, expected in zip(
        torch.autograd.grad(own, inputs, along),
        torch.autograd.grad(theirs, inputs, along),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, TURNED_ROUND.start - 1, *TURNED_ROUND, TURNED_ROUND.stop])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_few_rows_is_that_of_many(rows: int, biased: bool) -> None:
    x, weight, bias = leaves((1, rows, 24), (40, 24), (40,))
    inputs = [x, weight, *[bias] * biased]
    with torch.inference_mode():
        made = linear(*inputs)
        assert made.is_contiguous()
        torch.testing.assert_close(made, F.linear(*inputs), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(linear(*inputs), F.linear(*inputs)), (
            "what training computes first it computes again with gradients"
        )
    compare(linear(*inputs), F.linear(*inputs), inputs)


@pytest.mark.parametrize("lacks", [True, False])
@pytest.mark.parametrize(
    "rows", [1, IN_FLOAT32, TURNED_ROUND.start, TURNED_ROUND_IN_TILES.stop - 1, 70]
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_bf16_is_that_of_its_numbers_in_float64(
    lacks: bool, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds on processors without instructions for bf16 and with tiles, and for several blocks of the matrix."""
    monkeypatch.setattr(product, "lacks_bf16", lambda device: lacks)
    monkeypatch.setattr(product, "has_tiles", lambda device: not lacks)
    monkeypatch.setattr(product, "_BLOCK", 24 * 7)
    inputs = [leaf.detach().bfloat16() for leaf in leaves((1, rows, 24), (40, 24), (40,))]
    inputs = inputs[: 2 + biased]
    with torch.inference_mode():
        made = linear(*inputs)
    assert made.dtype == torch.bfloat16
    assert made.shape == (1, rows, 40)
    assert made.is_contiguous()
    exact = F.linear(*(each.double() for each in inputs))
    torch.testing.assert_close(made.double(), exact, rtol=2**-7, atol=0.05)
    plain = linear(*inputs)
    assert plain.equal(F.linear(*inputs)), "training computes the same bits for any number of rows"


def test_the_processor_says_whether_it_has_bf16() -> None:
    assert lacks_bf16("cuda") is False
    assert isinstance(lacks_bf16("cpu"), bool)


def test_a_norm_on_a_cpu_is_what_pytorch_makes_of_its_formula() -> None:
    x, weight = leaves((6, 3, 32), (32,))
    compare(rms_normalize(x, weight, 1e-4), F.rms_norm(x, (32,), weight, 1e-4), [x, weight])


def test_a_product_is_compiled_for_any_number_of_rows() -> None:
    """Layers need this if tensor ranks share their sequence: sizes are then symbols."""
    compiled = torch.compile(linear, backend="eager", dynamic=True, fullgraph=True)
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for rows in (TURNED_ROUND.start, TURNED_ROUND.stop):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(compiled(x, weight), x @ weight.t())
