"""The backward pass computes again exactly the tensors that were not saved, whatever the operation saves."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.recompute import keep, make_again
from megatron_lite.products import product
from tests.trainer.parallel.small import MODELS, SELECTIVE, Case, make_engine, weights_of

WEIGHT = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def turned_round(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, for which autograd saves x'."""
    made = (weight @ x.reshape(-1, x.shape[-1]).t()).t().contiguous().view(*x.shape[:-1], -1)
    return made if bias is None else made + bias


def added_to(made: Tensor) -> Tensor:
    """Saved after it was changed in place."""
    return made.add_(1.0).square()


def first_row_for_all(made: Tensor) -> Tensor:
    """Saved as a view of as many elements, all of one row."""
    row = made[:1].expand_as(made)
    return row * row


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda made: made @ WEIGHT.t(),
    "product turned round": lambda made: turned_round(made, WEIGHT),
    "of a transposed one": lambda made: made.transpose(0, 1).square(),
    "of a permuted one": lambda made: made.permute(2, 0, 1).exp() * made.permute(2, 0, 1),
    "of a flat one": lambda made: made.flatten(0, 1).t().square(),
    "of some rows": lambda made: made[:2].square(),
    "of one row many times": first_row_for_all,
    "in place": added_to,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["contiguous", "not contiguous"])
def test_any_view_of_what_is_made_again_is_found_as_it_was_saved(
    use: Callable[[Tensor], Tensor], order: tuple[int, ...]
) -> None:
    x = (
        torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
        .permute(order)
        .requires_grad_()
    )
    found = []
    for how in (keep, make_again):
        made = how(lambda x: torch.tanh(x) + 0.5, x, use)
        along = torch.arange(made.numel(), dtype=made.dtype).view(made.shape)
        found.append((made, *torch.autograd.grad(made, (x, WEIGHT), along, allow_unused=True)))
    for kept, again in zip(*found, strict=True):
        assert (kept is None and again is None) or torch.equal(kept, again)


def trained(
    model: str, tokens: int, *, again: bool
) -> tuple[float, float | None, dict[str, Tensor]]:
    """Loss, norm of gradients and weights after a step of one sequence."""
    case = Case(model)
    engine: Engine = make_engine(replace(case, recompute=SELECTIVE) if again else case)
    words = torch.randint(
        MODELS[model].vocab, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens)
    )
    report = engine.train_step([Microbatch(words[:, :-1], words[:, 1:])], 1e-3)
    return report.loss, report.grad_norm, weights_of(engine)


@pytest.mark.parametrize("round_", [False, True], ids=["as it is", "turned round"])
@pytest.mark.parametrize("model", ["qwen3", "gpt2", "deepseek_v3"])
def test_layers_of_few_rows_learn_the_same_bits(
    model: str, round_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if round_:
        monkeypatch.setattr(product, "linear", turned_round)
    for tokens in (product.TURNED_ROUND.start, product.TURNED_ROUND.stop - 1):
        (*figures, weights), (*again, others) = (
            trained(model, tokens, again=again) for again in (False, True)
        )
        assert figures == again
        assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
