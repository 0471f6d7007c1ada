"""Divergences between two predictions of a token: p, the student's, and q, the teacher's.

| beta       | divergence                                                               |
|------------|--------------------------------------------------------------------------|
| 0          | KL(q, p): p has to cover all that q finds likely                         |
| 1          | KL(p, q): p has to leave out all that q finds unlikely                   |
| between    | beta KL(q, m) + (1 - beta) KL(p, m), with m = beta q + (1 - beta) p      |

As TRL's GKD has it (arXiv 2306.13649). Each tensor rank has some columns of both: log_p and log_q, float32 [rows, own columns].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor


class Divergence(Protocol):
    """A divergence that is a function of sums over columns. The ranks add up their sums."""

    def sums(self, log_p: Tensor, log_q: Tensor) -> Sequence[Tensor]:
        """Return the sums over own columns, each [rows]."""

    def value(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the divergence, [rows]. sums: over all columns."""

    def gradient(self, log_p: Tensor, log_q: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """Return the derivative by the logits of log_p, [rows, own columns]."""


def divergence_of(beta: float) -> Divergence:
    """Return the divergence. beta: 0 to 1."""
    if beta == 0:
        return _Forward()
    return _Reverse() if beta == 1 else _Between(beta)


class _Forward:
    def sums(self, log_p: Tensor, log_q: Tensor) -> Sequence[Tensor]:
        return [_mean_of_difference(log_q, log_p)]

    def value(self, sums: Sequence[Tensor]) -> Tensor:
        return sums[0]

    def gradient(self, log_p: Tensor, log_q: Tensor, sums: Sequence[Tensor]) -> Tensor:
        return log_p.exp() - log_q.exp()


class _Reverse:
    def sums(self, log_p: Tensor, log_q: Tensor) -> Sequence[Tensor]:
        return [_mean_of_difference(log_p, log_q)]

    def value(self, sums: Sequence[Tensor]) -> Tensor:
        return sums[0]

    def gradient(self, log_p: Tensor, log_q: Tensor, sums: Sequence[Tensor]) -> Tensor:
        return _gradient_of_mean(log_p, log_q, sums[0])


@dataclass(frozen=True)
class _Between:
    beta: float

    def sums(self, log_p: Tensor, log_q: Tensor) -> Sequence[Tensor]:
        mixed = self._mixed(log_p, log_q)
        return [_mean_of_difference(log_p, mixed), _mean_of_difference(log_q, mixed)]

    def value(self, sums: Sequence[Tensor]) -> Tensor:
        of_student, of_teacher = sums
        return torch.lerp(of_student, of_teacher, self.beta)

    def gradient(self, log_p: Tensor, log_q: Tensor, sums: Sequence[Tensor]) -> Tensor:
        # The terms by the mixture's own change add up to 0.
        mixed = self._mixed(log_p, log_q)
        return _gradient_of_mean(log_p, mixed, sums[0]).mul_(1 - self.beta)

    def _mixed(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the logarithm of the mixture."""
        return torch.logaddexp(log_p + log(1 - self.beta), log_q + log(self.beta))


def _mean_of_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return own columns' part of KL(a, b), [rows]. a, b: logarithms."""
    return ((a - b) * a.exp()).sum(1)


def _gradient_of_mean(log_p: Tensor, other: Tensor, mean: Tensor) -> Tensor:
    """Return the derivative of KL(p, other) by the logits of p, as if `other` were constant. mean: KL(p, other), [rows]."""
    return (log_p - other - mean.unsqueeze(1)).mul_(log_p.exp())
