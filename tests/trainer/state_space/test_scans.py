"""The chunked scans equal their recurrences, token by token: values, states and all gradients, in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.state_space.gated_delta import gated_delta_rule, gated_delta_step
from megatron_lite.models.state_space.kimi_delta import (
    decayed_products,
    kimi_delta_rule,
    kimi_delta_step,
)
from megatron_lite.models.state_space.mamba2 import ssd, ssd_step
from megatron_lite.models.state_space.short_convolution import short_convolution

Found = tuple[Tensor, Tensor]


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    groups: int
    width: int
    state: int
    chunk: int
    documents: tuple[tuple[int, ...], ...] | None = None


SHAPES = [
    Shape(1, 1, 2, 1, 3, 4, 8),
    Shape(2, 8, 4, 2, 3, 5, 8),
    Shape(1, 9, 4, 4, 3, 2, 8),
    Shape(2, 37, 4, 1, 5, 3, 8),
    Shape(1, 64, 2, 2, 4, 6, 16),
    Shape(3, 30, 6, 3, 2, 4, 7),
    Shape(1, 130, 2, 1, 4, 4, 64),
    Shape(2, 16, 4, 2, 3, 5, 8, ((16,), (7, 9))),
    Shape(1, 40, 4, 2, 3, 5, 8, ((8, 8, 24),)),
    Shape(2, 21, 2, 1, 3, 4, 8, ((1,) * 21, (3, 1, 1, 13, 3))),
    Shape(1, 50, 4, 4, 2, 3, 16, ((16, 1, 2, 31),)),
    Shape(2, 33, 4, 2, 3, 2, 4, ((30, 3), (5, 28))),
]


def numbers_of(shape: Shape) -> Tensor | None:
    """int64 [batch, tokens]: the number of each token's document, of which the rows' first ones differ."""
    if shape.documents is None:
        return None
    rows = [
        torch.repeat_interleave(torch.arange(len(row)) + 3 * number, torch.tensor(row))
        for number, row in enumerate(shape.documents)
    ]
    return torch.stack(rows)


def draws(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw


def of_mamba(shape: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, A, B, C, D and a state before the row."""
    draw = draws(dtype)
    rows, heads, groups = (shape.batch, shape.tokens), shape.heads, shape.groups
    return [
        draw(*rows, heads, shape.width),
        F.softplus(draw(*rows, heads)),
        -draw(heads).exp(),
        draw(*rows, groups, shape.state),
        draw(*rows, groups, shape.state),
        draw(heads),
        draw(shape.batch, heads, shape.width, shape.state),
    ]


def of_delta(shape: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k (of length 1), v, g, beta and a state before the row."""
    draw = draws(dtype)
    rows = (shape.batch, shape.tokens)
    return [
        F.normalize(draw(*rows, shape.groups, shape.state), dim=-1),
        F.normalize(draw(*rows, shape.groups, shape.state), dim=-1),
        draw(*rows, shape.heads, shape.width),
        -F.softplus(draw(*rows, shape.heads)),
        draw(*rows, shape.heads).sigmoid(),
        draw(shape.batch, shape.heads, shape.state, shape.width),
    ]


def of_kimi(shape: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same, with as many key heads as heads, and a decay for each channel of a key."""
    q, k, v, _, beta, state = of_delta(shape._replace(groups=shape.heads), dtype)
    slow = draws(dtype)(shape.batch, shape.tokens, shape.heads, shape.state)
    return [q, k, v, -F.softplus(slow), beta, state]


def ssd_by_token(*inputs: Tensor, documents: Tensor | None, state: Tensor) -> Found:
    x, dt, a, b, c, d = inputs

    def step(token: int, state: Tensor) -> Found:
        return ssd_step(x[:, token], dt[:, token], a, b[:, token], c[:, token], d, state)

    return by_token(step, x.shape[1], documents, state)


def delta_by_token(*inputs: Tensor, documents: Tensor | None, state: Tensor) -> Found:
    def step(token: int, state: Tensor) -> Found:
        return gated_delta_step(*(each[:, token] for each in inputs), state)

    return by_token(step, inputs[0].shape[1], documents, state)


def kimi_by_token(*inputs: Tensor, documents: Tensor | None, state: Tensor) -> Found:
    def step(token: int, state: Tensor) -> Found:
        return kimi_delta_step(*(each[:, token] for each in inputs), state)

    return by_token(step, inputs[0].shape[1], documents, state)


def kimi_in_chunks(*inputs: Tensor, chunk: int, **others: Any) -> Found:
    """The rule with the next power of 2 in place of another chunk."""
    return kimi_delta_rule(*inputs, chunk=1 << (chunk - 1).bit_length(), **others)


def by_token(
    step: Callable[[int, Tensor], Found], tokens: int, documents: Tensor | None, state: Tensor
) -> Found:
    """The recurrence. A row's state is zero before each document but the first."""
    found = []
    for token in range(tokens):
        if documents is not None and token:
            same = documents[:, token] == documents[:, token - 1]
            state = state * same[:, None, None, None]
        y, state = step(token, state)
        found.append(y)
    return torch.stack(found, 1), state


SCANS: dict[str, tuple[Any, Any, Any]] = {
    "ssd": (ssd, ssd_by_token, of_mamba),
    "gated delta rule": (gated_delta_rule, delta_by_token, of_delta),
    "kimi delta rule": (kimi_in_chunks, kimi_by_token, of_kimi),
}


def results(scan: Any, inputs: list[Tensor], documents: Tensor | None, **how: Any) -> list[Tensor]:
    """y, the last state, and the gradients of all inputs for a random weight of each result."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    *given, state = leaves
    y, last = scan(*given, documents=documents, state=state, **how)
    draw = draws(y.dtype)
    total = (y * draw(*y.shape)).sum() + (last * draw(*last.shape)).sum()
    return [y.detach(), last.detach(), *torch.autograd.grad(total, leaves)]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any tensor, against its largest value."""
    return max(
        float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-30))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_a_chunked_scan_is_its_recurrence(name: str, shape: Shape) -> None:
    chunked, recurrence, draw = SCANS[name]
    inputs, documents = draw(shape), numbers_of(shape)
    expected = results(recurrence, inputs, documents)
    assert furthest(results(chunked, inputs, documents, chunk=shape.chunk), expected) < 1e-12
    in_float32 = [each.float() for each in inputs]
    assert furthest(results(chunked, in_float32, documents, chunk=shape.chunk), expected) < 2e-5


@pytest.mark.parametrize("name", SCANS)
def test_a_state_goes_on_where_another_call_ended(name: str) -> None:
    chunked, _, draw = SCANS[name]
    *inputs, state = draw(Shape(2, 45, 4, 2, 3, 5, 8))
    whole, last = chunked(*inputs, chunk=8, state=state)
    pieces = []
    for piece in (slice(0, 1), slice(1, 20), slice(20, 45)):
        given = [each[:, piece] if each.dim() > 1 else each for each in inputs]
        y, state = chunked(*given, chunk=8, state=state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCANS)
def test_without_a_state_a_row_begins_with_zeros(name: str) -> None:
    chunked, _, draw = SCANS[name]
    *inputs, state = draw(Shape(2, 20, 4, 2, 3, 5, 8))
    found = chunked(*inputs, chunk=8)
    expected = chunked(*inputs, chunk=8, state=torch.zeros_like(state))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SCANS)
def test_bf16_inputs_are_computed_in_float32(name: str) -> None:
    chunked, _, draw = SCANS[name]
    *inputs, state = (each.bfloat16() for each in draw(Shape(2, 40, 4, 2, 3, 5, 8)))
    y, last = chunked(*inputs, chunk=8, state=state.float())
    expected, exact = chunked(*(each.float() for each in inputs), chunk=8, state=state.float())
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, expected.bfloat16())
    assert torch.equal(last, exact)


@pytest.mark.parametrize("name", SCANS)
def test_long_decays_give_no_nan(name: str) -> None:
    """exp of a sum over a whole chunk is 0 in float32, and of its inverse infinite."""
    chunked, _, draw = SCANS[name]
    inputs = draw(Shape(1, 64, 2, 1, 3, 4, 64), torch.float32)
    slow = 1 if name == "ssd" else 3
    inputs[slow] = inputs[slow] * 50
    found = results(chunked, inputs, None, chunk=64)
    assert all(bool(each.isfinite().all()) for each in found)


def test_a_decay_that_all_channels_share_gives_the_gated_delta_rule() -> None:
    q, k, v, g, beta, state = of_delta(Shape(2, 45, 4, 4, 3, 5, 8))
    of_channels = g.unsqueeze(-1).expand(*g.shape, 5)
    found = kimi_delta_rule(q, k, v, of_channels, beta, chunk=16, state=state)
    expected = gated_delta_rule(q, k, v, g, beta, chunk=16, state=state)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("speed", [1e-3, 1.0, 30.0, 3000.0])
def test_products_with_decays_of_any_speed_are_exact(speed: float) -> None:
    """The factor of the older token is up to exp(3000 x 64) if it stands alone."""
    draw = draws(torch.float64)
    left, right = draw(2, 64, 6), draw(2, 64, 6)
    # Some channels forget at once, others keep all.
    slow = F.softplus(draw(2, 64, 6)) * torch.tensor([0, 1e-6, 0.1, 1.0, 1.0, speed])
    decay = -(speed * slow).cumsum(1)
    between = (decay.unsqueeze(2) - decay.unsqueeze(1)).clamp(max=0).exp()
    expected = torch.einsum("btd,bsd,btsd->bts", left, right, between).tril()
    torch.testing.assert_close(decayed_products(left, right, decay), expected)
    in_float32 = decayed_products(left.float(), right.float(), decay.float())
    assert (in_float32 - expected).abs().max() < 1e-5 * max(1.0, speed) * expected.abs().max()


@pytest.mark.parametrize("documents", [None, ((4, 1, 1, 14), (20,))])
def test_the_convolution_is_torchs(documents: tuple[tuple[int, ...], ...] | None) -> None:
    draw = draws(torch.float64)
    x, weight, bias = draw(20, 2, 6), draw(6, 1, 4), draw(6)
    numbers = numbers_of(Shape(2, 20, 1, 1, 1, 1, 1, documents))
    found, last = short_convolution(x, weight, bias, documents=numbers)
    for row, lengths in enumerate(documents or ((20,), (20,))):
        parts = [
            F.conv1d(F.pad(part.t(), (3, 0)), weight, bias, groups=6).t()
            for part in x[:, row].split(lengths)
        ]
        torch.testing.assert_close(found[:, row], torch.cat(parts), rtol=1e-12, atol=1e-12)
    assert torch.equal(last, x[-3:].permute(1, 2, 0))


def test_a_convolution_goes_on_where_another_call_ended() -> None:
    draw = draws(torch.float64)
    x, weight, bias = draw(11, 2, 6), draw(6, 1, 4), draw(6)
    whole, last = short_convolution(x, weight, bias)
    before, pieces = None, []
    for piece in x.split((1, 1, 2, 7)):
        y, before = short_convolution(piece, weight, bias, before=before)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)
    assert before is not None
    assert torch.equal(before, last)
