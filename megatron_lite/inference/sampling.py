"""Chooses the next token: changes to logits in the order of transformers, and the random draw.

A draw depends only on the request's seed and the token's position. Other requests in the batch don't change it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.image_tokens import without_images
from megatron_lite.models.rng import mix

GREEDY_BELOW = 1e-5
"""A temperature below this bound chooses the likeliest token. Logits divided by it may overflow."""
LEAST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 1e-3, 1e3
"""Logits multiplied or divided by a value beyond these bounds may overflow."""


@dataclass(frozen=True)
class Sampling:
    """Options for the choice of tokens."""

    temperature: float = 1.0
    """Divisor of the logits; 0, and any value below GREEDY_BELOW: always the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens, and tokens as likely as the last of them; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens, up to the one with which their probabilities reach this sum; 1: all."""
    repetition_penalty: float = 1.0
    """For tokens that the row contains, positive logits are divided by it and negative logits multiplied."""
    seed: int = 0
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was generated before."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens. -100 forbids a token."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest token's probability; 0: all."""

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        for wrong, message in (
            (
                not 0 <= self.temperature < float("inf"),
                f"temperature {self.temperature} must be 0 or more",
            ),
            (self.top_k < 0, f"top_k {self.top_k} must be 0 or more"),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1"),
            (not 0 <= self.min_p <= 1, f"min_p {self.min_p} must be from 0 to 1"),
            (
                not LEAST_REPETITION_PENALTY
                <= self.repetition_penalty
                <= LARGEST_REPETITION_PENALTY,
                f"repetition_penalty {self.repetition_penalty} must be from {LEAST_REPETITION_PENALTY:g} to {LARGEST_REPETITION_PENALTY:g}",
            ),
        ):
            if wrong:
                raise UsageError(message)

    @property
    def greedy(self) -> bool:
        """True if always the likeliest token is chosen."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


PLAIN = Sampling()
"""Sampling with the model's probabilities."""


def choose(
    logits: Tensor,
    row: Sequence[int],
    sampling: Sampling,
    *,
    generated: Sequence[int] = (),
    allowed: Tensor | None = None,
) -> int:
    """Return the next token of a row. logits float32 [vocabulary].

    row: all tokens so far, including the prompt. generated: those after the prompt.
    allowed: bool [vocabulary]: True for tokens that may be chosen; None: all.
    """
    if sampling.repetition_penalty != 1:
        logits = penalize(logits, row, sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        logits = discourage(logits, generated, sampling)
    if sampling.logit_bias:
        logits = biased(logits, sampling.logit_bias)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sampling.greedy:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    generator = torch.Generator().manual_seed(mix(sampling.seed, len(row)))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def penalize(logits: Tensor, row: Sequence[int], penalty: float) -> Tensor:
    """Apply the repetition penalty. logits [vocabulary]; row: all tokens so far, including the prompt."""
    seen = torch.tensor(sorted(set(without_images(row))), dtype=torch.int64)
    found = logits[seen]
    changed = logits.clone()
    changed[seen] = torch.where(found < 0, found * penalty, found / penalty)
    return changed


def discourage(logits: Tensor, generated: Sequence[int], sampling: Sampling) -> Tensor:
    """Apply OpenAI's penalties for tokens that were generated before. logits [vocabulary]."""
    counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=len(logits))
    presence = sampling.presence_penalty * (counts > 0)
    frequency = sampling.frequency_penalty * counts
    return logits - presence - frequency


def biased(logits: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """Return [vocabulary] with a number added to the logits of some tokens."""
    tokens, numbers = zip(*bias, strict=True)
    return logits.index_add(0, torch.tensor(tokens), torch.tensor(numbers, dtype=logits.dtype))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """[..., vocabulary]: set all logits except the k highest to -inf. Logits equal to the k-th stay too."""
    least = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """[..., vocabulary]: remove tokens with less than this share of the likeliest token's probability."""
    least = logits.amax(-1, keepdim=True) + math.log(share)
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """[..., vocabulary]: remove a token if the likelier tokens together have more than p. The likeliest token always stays."""
    ordered, places = logits.sort(-1, descending=True)
    above = ordered.softmax(-1).cumsum(-1) > p
    # Shift by one: a token is removed if the tokens before it exceed p.
    gone = torch.cat((torch.zeros_like(above[..., :1]), above[..., :-1]), -1)
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf)


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a chosen token, from the raw logits."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, the best first."""


def likelihood(logits: Tensor, token: int, top: int) -> Likelihood:
    """Return the likelihood of a token. logits float32 [vocabulary]."""
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(top)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Likelihood(float(log_probs[token]), tuple(pairs))
