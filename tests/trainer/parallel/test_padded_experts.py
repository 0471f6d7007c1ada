"""Experts that are padded to their capacity: Megatron core's own steps, and the steps of the trainer without padding."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaconv.planning.capacity import capacity_of
from megatron_lite.models.build_plan import NO_OTHERS
from megatron_lite.models.moe.capacity import taken
from megatron_lite.models.moe.counting import RowNumbers
from megatron_lite.models.moe.dispatch import by_exchange
from megatron_lite.models.moe.gathering import by_gathering
from megatron_lite.models.moe.padding import padded_copies
from megatron_lite.settings.options import Balancing
from tests.trainer.parallel.small import FULL, SELECTIVE, Case, Trained, train
from tests.trainer.parallel.worlds import World

TOKENS, WIDTH, EXPERTS, PER_TOKEN = 12, 6, 5, 2
DROPPED = EXPERTS


class Given:
    """Tokens, their experts and weights, and a matrix of each expert."""

    def __init__(self, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            values = torch.randn(*shape, dtype=torch.float64, generator=generator)
            return values.requires_grad_()

        self.x = drawn(TOKENS, WIDTH)
        self.logits = drawn(TOKENS, EXPERTS)
        self.matrices = drawn(EXPERTS, WIDTH, WIDTH)
        self.grad = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)

    def compute(self, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """Multiply the rows of each expert by its matrix."""
        parts = torch.split(rows, counts)
        made = [part @ matrix for part, matrix in zip(parts, self.matrices, strict=True)]
        return torch.cat(made).tanh() * weights

    def gradients(self, made: Tensor) -> list[Tensor]:
        """Return the result and the gradients of tokens, logits and matrices."""
        inputs = (self.x, self.logits, self.matrices)
        return [made, *torch.autograd.grad(made, inputs, self.grad)]


def _by_us(given: Given, factor: float, policy: str, dispatch: object, *, pads: bool) -> Tensor:
    weights, chosen = given.logits.softmax(-1).topk(PER_TOKEN, -1)
    stay = taken(weights, chosen, EXPERTS, factor, policy)
    chosen = chosen.masked_fill(~stay, DROPPED)
    capacity = capacity_of(TOKENS, PER_TOKEN, EXPERTS, factor)
    numbers = RowNumbers(capacity=capacity) if pads else RowNumbers()
    made: Tensor = dispatch(  # type: ignore[operator]
        given.x, weights, chosen, EXPERTS, NO_OTHERS, given.compute, numbers
    )
    return made


def _by_core(given: Given, factor: float, policy: str) -> Tensor:
    """Megatron core's steps: drop, pad, permute, compute, and return the rows to their tokens."""
    core = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    weights, chosen = given.logits.softmax(-1).topk(PER_TOKEN, -1)
    probs = torch.zeros_like(given.logits).scatter(1, chosen, weights)
    chosen_by = torch.zeros_like(given.logits).scatter(1, chosen, 1.0).bool()
    probs, routing = core.apply_router_token_dropping(
        probs, chosen_by, PER_TOKEN, factor, policy, pad_to_capacity=True
    )
    capacity = core.get_capacity(TOKENS * PER_TOKEN, EXPERTS, factor)
    # Padding counts as tokens of the experts, so that it would hide which experts are busy.
    assert routing.sum(0).tolist() == [capacity] * EXPERTS
    rows, row_probs, order, *_ = core.permute(
        given.x, routing, probs, num_out_tokens=capacity * EXPERTS, drop_and_pad=True
    )
    made = given.compute(rows, row_probs.unsqueeze(1), [capacity] * EXPERTS)
    found: Tensor = core.unpermute(made, order, given.x.shape, drop_and_pad=True)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.4, 1.0, 1.7, 2.5])
def test_results_and_gradients_are_megatron_cores(factor: float, policy: str) -> None:
    """The largest factor gives each expert as many rows as there are tokens, so that no expert drops one."""
    for dispatch in (by_exchange, by_gathering):
        given = Given()
        ours = given.gradients(_by_us(given, factor, policy, dispatch, pads=True))
        theirs = given.gradients(_by_core(given, factor, policy))
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.1, 1.0, 100.0])
def test_results_and_gradients_are_those_without_padding(factor: float, policy: str) -> None:
    for dispatch in (by_exchange, by_gathering):
        given = Given()
        padded = given.gradients(_by_us(given, factor, policy, dispatch, pads=True))
        plain = given.gradients(_by_us(given, factor, policy, dispatch, pads=False))
        for found, expected in zip(padded, plain, strict=True):
            torch.testing.assert_close(found, expected)


def test_capacity_is_megatron_cores_but_no_more_than_the_tokens() -> None:
    """Core fails if a capacity is larger than the number of tokens."""
    core = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    for tokens in (1, 7, 64):
        for factor in (0.01, 0.5, 1.0, 1.25, 3.0):
            theirs = core.get_capacity(tokens * PER_TOKEN, EXPERTS, factor)
            assert capacity_of(tokens, PER_TOKEN, EXPERTS, factor) == min(theirs, tokens)


def test_rows_of_padding_are_zeros_and_no_choice_has_one() -> None:
    """Expert 1 has two of its three rows, expert 0 none. The first choice of the last token was dropped."""
    chosen = torch.tensor([[2, 1], [2, 1], [3, 2]])
    copies = padded_copies(chosen, experts=3, capacity=3)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    assert copies.of(x).flatten().tolist() == [0, 0, 0, 1, 2, 0, 1, 2, 3]
    weights = copies.weights(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])).flatten()
    torch.testing.assert_close(weights[[3, 4, 6, 7, 8]], torch.tensor([0.2, 0.4, 0.1, 0.3, 0.6]))
    # Rows of padding may hold anything.
    rows = torch.tensor([math.nan, math.inf, math.nan, 1, 2, math.nan, 10, 20, 30]).unsqueeze(1)
    assert copies.summed(rows, x).flatten().tolist() == [11, 22, 30]


BALANCE = Balancing(
    losses=(("aux_loss", 0.02), ("seq_aux_loss", 0.02), ("global_aux_loss", 0.02)),
    z_loss=1e-3,
    bias_rate=1e-3,
    capacity_factor=1.0,
)
STEPS = 3


def _both(case: Case) -> tuple[Case, Case]:
    """Return the case without and with padding."""
    plain, padded = (
        replace(case, steps=STEPS, options=(*case.options, ("balance", balance)))
        for balance in (BALANCE, replace(BALANCE, pads=True))
    )
    return plain, padded


def _require_same(found: Trained, expected: Trained) -> None:
    for ours, theirs in zip(found.reports, expected.reports, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-6)


ALONE = [
    Case("mixtral", recompute=FULL),
    Case("gpt_oss"),
    Case("llama4", recompute=SELECTIVE),
    Case("further tokens"),
]
MORE_ALONE = [
    Case("deepseek_v3", recompute=FULL),
    Case("hybrid"),
    Case("delta nets, experts"),
]


@pytest.mark.parametrize(
    "case",
    [*ALONE, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_ALONE)],
    ids=str,
)
def test_steps_are_those_without_padding(case: Case) -> None:
    """With biases, weights on inputs, packed rows, recomputation, and all balancing losses."""
    plain, padded = _both(case)
    _require_same(train(0, padded), train(0, plain))


GATHERED = (("dispatcher", "allgather"),)
LAYOUTS = [Case("further tokens", tp=2, ep=2, sequence_parallel=True, recompute=FULL)]
MORE_LAYOUTS = [
    Case("mixtral", tp=2, sequence_parallel=True),
    Case("mixtral", dp=2, ep=2, distributed=True),
    Case("mixtral", dp=2, ep=2, options=GATHERED),
    Case("gpt_oss", tp=2, dp=2, ep=4, sequence_parallel=True, recompute=SELECTIVE),
    Case("deepseek_v3", pp=2, dp=2, ep=2, distributed=True, zero=2),
    Case("mixtral", tp=2, dp=2, ep=2, sequence_parallel=True, options=GATHERED),
    Case("mixtral", cp=2, ep=2),
]


@pytest.mark.parametrize(
    "case",
    [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_LAYOUTS)],
    ids=str,
)
def test_ranks_train_as_without_padding(case: Case, world: World) -> None:
    plain, padded = _both(case)
    expected = world.run(case.world, train, plain)
    found = world.run(case.world, train, padded)
    for ours, theirs in zip(found, expected, strict=True):
        _require_same(ours, theirs)
