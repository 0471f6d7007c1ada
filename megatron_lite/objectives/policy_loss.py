"""The loss of GRPO (arXiv:2402.03300): clipped probability ratios times advantages, and the divergence from a reference.

Names and defaults are TRL's. `dapo` is arXiv:2503.14476, `dr_grpo` arXiv:2503.20783, `cispo` arXiv:2506.13585, and `sapo`
arXiv:2511.20347. Ratios of whole completions are arXiv:2507.18071 (GSPO), `delta` is arXiv:2505.07291.
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

OVER_TOKENS = ("dapo", "cispo")
"""Losses that are means over all tokens of a step."""
LARGEST_WEIGHT = 5.0
"""The usual limit of the weights of `cispo`: that of ScaleRL (arXiv:2510.13786)."""


@dataclass(frozen=True)
class Policy:
    """Options of the loss."""

    loss_type: str = "dapo"
    """`dapo`: mean over tokens. `grpo`: mean over rows of their mean. `dr_grpo`: the same with `most_tokens` as divisor.
    `cispo`: as `dapo`, with ratios as weights that have no gradient. `sapo`: as `grpo`, with a smooth limit."""
    most_tokens: int = 512
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    """The limit above 1; for `cispo` the limit itself."""
    delta: float | None = None
    """A limit of all ratios; None without one."""
    of_completions: bool = False
    """True if all labels of a row have one ratio, whose logarithm is the mean of theirs."""
    temperatures: tuple[float, float] = (1.0, 1.05)
    """For `sapo`, with an advantage above 0 and with another one."""
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
        over_tokens = self.options.loss_type in OVER_TOKENS
        return batch.tokens.numel() if over_tokens else len(batch.tokens)

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss.

        The head is computed twice if the weight of a label's loss depends on the label's log-probability.
        """
        counting = run.label_weights()
        log_probs = torch.zeros_like(counting)
        # While ratios are 1 and there is no divergence, the log-probabilities have no effect. `cispo` reports them.
        if OLD in run.extras or self.options.beta or self.options.loss_type == "cispo":
            with torch.no_grad():
                _, losses = stage.label_losses(given, run.labels, counting)
            log_probs = -losses
        judged = judge_labels(log_probs, counting, run.extras, self.options)
        total, _ = stage.label_losses(given, run.labels, judged.weights * run.share)
        found = {"loss": judged.loss, "clip_ratio": judged.clipped}
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
    """Losses of tokens (OVER_TOKENS), otherwise of rows, with their counts."""
    clipped: Counted
    """1 where the clip removes the gradient; of labels, or of rows if they have one ratio."""
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
        if options.of_completions:
            gains = gains.sum(1, keepdim=True) / counting.sum(1, keepdim=True).clamp(min=1)
        ratios = gains.exp()
        each = -_limited(ratios, own, advantages, options).expand_as(own)
        divergence = None
        if options.beta:
            divergence = _divergence((extras[REFERENCE] - own) * counting)
            if options.corrects_divergence:
                divergence = divergence * ratios
            each = each + options.beta * divergence
        shares = _shares(counting, options)
        (slopes,) = torch.autograd.grad((each * shares).sum(), own)
    clipped = _clipped(ratios, advantages, options).float()
    counted = torch.ones_like(clipped) if options.of_completions else counting
    return JudgedLabels(
        weights=-slopes,
        loss=_counted(each.detach(), shares, options),
        clipped=Counted(clipped, counted),
        divergence=None if divergence is None else divergence.detach(),
    )


def _limited(ratios: Tensor, log_probs: Tensor, advantages: Tensor, options: Policy) -> Tensor:
    """Return the ratios times the advantages, with their limits. ratios: [rows, sequence] or [rows, 1]."""
    if options.loss_type == "cispo":
        return ratios.clamp(max=options.epsilon_high).detach() * advantages * log_probs
    if options.loss_type == "sapo":
        better, other = options.temperatures
        steepness = torch.where(advantages > 0, better, other)
        return (steepness * (ratios - 1)).sigmoid() * 4 / steepness * advantages
    limited = ratios.clamp(1 - options.epsilon, 1 + options.epsilon_high)
    free = ratios if options.delta is None else ratios.clamp(max=options.delta)
    return torch.minimum(free * advantages, limited * advantages)


def _clipped(ratios: Tensor, advantages: Tensor, options: Policy) -> Tensor:
    """Return bool, as ratios: where the limit removes the gradient."""
    if options.loss_type == "sapo":
        return torch.zeros_like(ratios, dtype=torch.bool)
    if options.loss_type == "cispo":
        return (ratios > options.epsilon_high) & (advantages > 0)
    low = (ratios < 1 - options.epsilon) & (advantages < 0)
    return low | (ratios > 1 + options.epsilon_high) & (advantages > 0)


def _divergence(differences: Tensor) -> Tensor:
    """Return the estimate k3 of the divergence. differences: log-probabilities of the reference minus the model's."""
    return differences.exp() - differences - 1


def _shares(counting: Tensor, options: Policy) -> Tensor:
    """Return the weight of each label in the sum over labels of a row."""
    if options.loss_type in ("grpo", "sapo"):
        return counting / counting.sum(1, keepdim=True).clamp(min=1)
    if options.loss_type == "dr_grpo":
        return counting / options.most_tokens
    return counting


def _counted(each: Tensor, shares: Tensor, options: Policy) -> Counted:
    if options.loss_type in OVER_TOKENS:
        return Counted(each, shares)
    rows = (each * shares).sum(1)
    return Counted(rows, torch.ones_like(rows))
