"""The loss of GRPO (arXiv:2402.03300): clipped probability ratios times advantages, and the divergence from a reference.

Names and defaults are TRL's. `dapo` is arXiv:2503.14476, `dr_grpo` is arXiv:2503.20783.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload

ADVANTAGES = "advantages"
"""Name among a microbatch's extras: float32 [rows]."""
OLD = "old_log_probs"
"""Name among a microbatch's extras: float32 [rows, sequence], of each label at the time of sampling.

If it is missing, the weights have not changed since.
"""
REFERENCE = "reference_log_probs"
"""Name among a microbatch's extras: float32 [rows, sequence], of each label under the reference model."""


@dataclass(frozen=True)
class Policy:
    """Options of the loss."""

    loss_type: str = "dapo"
    """`dapo`: mean over tokens. `grpo`: mean over rows of their mean. `dr_grpo`: the same with `most_tokens` as divisor."""
    most_tokens: int = 512
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    corrects_divergence: bool = True
    """True if the divergence of a label is multiplied by its ratio."""
    figures: tuple[str, ...] = ()
    """Names of extras, float32 [rows], whose means are reported."""


@dataclass(frozen=True)
class PolicyLoss(Criterion):
    """The loss of completions. Each row is a prompt with one completion, whose labels have weight 1."""

    trains_mtp = False
    options: Policy

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        divergence = ("kl",) if self.options.beta else ()
        return "loss", *self.options.figures, "clip_ratio", *divergence

    def counts(self, batch: Microbatch) -> int:
        over_tokens = self.options.loss_type == "dapo"
        return batch.tokens.numel() if over_tokens else len(batch.tokens)

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss.

        The head is computed twice if the weight of a label's loss depends on the label's log-probability.
        """
        counting = run.label_weights()
        log_probs = torch.zeros_like(counting)
        # While ratios are 1 and there is no divergence, the log-probabilities have no effect.
        if OLD in run.extras or self.options.beta:
            with torch.no_grad():
                _, losses = stage.label_losses(given, run.labels, counting)
            log_probs = -losses
        judged = judge_labels(log_probs, counting, run.extras, self.options)
        total, _ = stage.label_losses(given, run.labels, judged.weights * run.share)
        found = {"loss": judged.loss, "clip_ratio": Counted(judged.clipped, counting)}
        if judged.divergence is not None:
            found["kl"] = Counted(judged.divergence, counting)
        for name in self.options.figures:
            values = run.extras[name]
            found[name] = Counted(values, torch.ones_like(values))
        return total, found


class JudgedLabels(NamedTuple):
    """The loss of labels. Tensors are float32 [rows, sequence]."""

    weights: Tensor
    """The weight of each label's cross entropy. With these weights, the gradient is that of the sum of `loss`."""
    loss: Counted
    """Losses of tokens (`dapo`), otherwise of rows, with their counts."""
    clipped: Tensor
    """1 where the clip removes the gradient."""
    divergence: Tensor | None
    """The estimate of the divergence from the reference; None without one."""


def judge_labels(
    log_probs: Tensor, counting: Tensor, extras: Mapping[str, Tensor], options: Policy
) -> JudgedLabels:
    """Return the loss of each label. log_probs, counting (0 or 1): [rows, sequence]. extras: see the names above."""
    advantages = extras[ADVANTAGES].unsqueeze(1)
    with torch.enable_grad():  # differentiates a few numbers only, also in a pass without gradients
        own = log_probs.detach().requires_grad_()
        # Labels that don't count get a ratio of 1, so that their sizes don't matter.
        gains = (own - extras.get(OLD, log_probs.detach())) * counting
        ratios = gains.exp()
        limited = ratios.clamp(1 - options.epsilon, 1 + options.epsilon_high)
        each = -torch.minimum(ratios * advantages, limited * advantages)
        divergence = None
        if options.beta:
            divergence = _divergence((extras[REFERENCE] - own) * counting)
            if options.corrects_divergence:
                divergence = divergence * ratios
            each = each + options.beta * divergence
        shares = _shares(counting, options)
        (slopes,) = torch.autograd.grad((each * shares).sum(), own)
    clipped_low = (ratios < 1 - options.epsilon) & (advantages < 0)
    clipped_high = (ratios > 1 + options.epsilon_high) & (advantages > 0)
    return JudgedLabels(
        weights=-slopes,
        loss=_counted(each.detach(), shares, options),
        clipped=(clipped_low | clipped_high).float(),
        divergence=None if divergence is None else divergence.detach(),
    )


def _divergence(differences: Tensor) -> Tensor:
    """Return the estimate k3 of the divergence. differences: log-probabilities of the reference minus the model's."""
    return differences.exp() - differences - 1


def _shares(counting: Tensor, options: Policy) -> Tensor:
    """Return the weight of each label in the sum over labels of a row."""
    if options.loss_type == "grpo":
        return counting / counting.sum(1, keepdim=True).clamp(min=1)
    if options.loss_type == "dr_grpo":
        return counting / options.most_tokens
    return counting


def _counted(each: Tensor, shares: Tensor, options: Policy) -> Counted:
    if options.loss_type == "dapo":
        return Counted(each, shares)
    rows = (each * shares).sum(1)
    return Counted(rows, torch.ones_like(rows))
