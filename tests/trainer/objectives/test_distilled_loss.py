"""The loss of a student's logits against plain torch, with all that a head may have."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.loss import head_loss
from megatron_lite.models.teaching import Distilled, Teaching
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import Distillation

SEQUENCE, BATCH, WIDTH, TAUGHT_WIDTH, VOCAB, PADDED = 5, 2, 4, 6, 11, 12
TOKENS = SEQUENCE * BATCH
CAP, TAUGHT_CAP = 1.5, 2.5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """As TRL's GKDTrainer has it, of each token."""

    def kl(log_other: Tensor, log_own: Tensor) -> Tensor:
        return F.kl_div(log_other, log_own, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    parts = torch.stack((log_p + torch.tensor(1 - beta).log(), log_q + torch.tensor(beta).log()))
    mixed = parts.logsumexp(0)
    return beta * kl(mixed, log_q) + (1 - beta) * kl(mixed, log_p)


@pytest.mark.parametrize("rows", [3, 64], ids=["several blocks", "one block"])
@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize(
    "options",
    [
        Distillation(),
        Distillation(0.7, 2.0),
        Distillation(0.7, 2.0, 1.0),
        Distillation(1.0, 0.5, 0.3),
        Distillation(0.0),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_plain_torch(
    options: Distillation, cap: float | None, rows: int
) -> None:
    hidden, weight, bias = (
        drawn(SEQUENCE, BATCH, WIDTH, seed=1),
        drawn(PADDED, WIDTH, seed=2),
        drawn(PADDED, seed=3),
    )
    taught = drawn(SEQUENCE, BATCH, TAUGHT_WIDTH, seed=4)
    teaching = Teaching(
        taught, drawn(PADDED, TAUGHT_WIDTH, seed=5), drawn(PADDED, seed=6), TAUGHT_CAP
    )
    labels = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(7))
    weights = torch.rand(TOKENS, generator=torch.Generator().manual_seed(8))
    of_plain = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    logits = capped(F.linear(of_plain[0], *of_plain[1:]), cap).view(TOKENS, PADDED)[:, :VOCAB]
    teacher = F.linear(taught, teaching.weight, teaching.bias).view(TOKENS, PADDED)[:, :VOCAB]
    teacher = capped(teacher, TAUGHT_CAP)
    log_p, log_q = ((each / options.temperature).log_softmax(-1) for each in (logits, teacher))
    apart = divergence(log_p, log_q, options.beta) * options.temperature**2
    crossed = F.cross_entropy(logits, labels, reduction="none")
    expected = ((options.alpha * apart + (1 - options.alpha) * crossed) * weights).sum()
    expected.backward()

    own = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    loss = Distilled(labels, weights, teaching.rows(TensorGroup()), teaching, options)
    total, losses = head_loss(*own, loss, VOCAB, rows, TensorGroup(), cap)
    total.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(losses, torch.stack((crossed, apart)))
    for ours, theirs in zip(own, of_plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
