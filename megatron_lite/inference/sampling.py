"""The choice of the next token: what is done to logits, in the order in which transformers does it, and the draw.

A draw follows from a request's seed and the token's place alone, so that other requests in the same batch change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.models.rng import mix


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Only so many of the likeliest, and what is as likely as the last of them; 0: all."""
    top_p: float = 1.0
    """Only the likeliest, up to the one that makes their probabilities reach this; 1: all."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that the row has are divided by it, negative ones multiplied."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for what can't be meant."""
        for wrong, message in (
            (not 0 <= self.temperature < float("inf"), f"temperature {self.temperature} has to be 0 or more"),
            (self.top_k < 0, f"top_k {self.top_k} has to be 0 or more"),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p} has to be above 0 and at most 1"),
            (not self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} has to be above 0"),
        ):
            if wrong:
                raise UsageError(message)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


PLAIN = Sampling()
"""As likely as the model says."""


def choose(logits: Tensor, row: Sequence[int], sampling: Sampling) -> int:
    """The token behind a row. logits float32 [vocabulary]."""
    if sampling.repetition_penalty != 1:
        logits = penalize(logits, row, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    generator = torch.Generator().manual_seed(mix(sampling.seed, len(row)))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def penalize(logits: Tensor, row: Sequence[int], penalty: float) -> Tensor:
    """logits [vocabulary], row: all tokens so far, the prompt's too."""
    seen = torch.tensor(sorted(set(row)), dtype=torch.int64)
    found = logits[seen]
    changed = logits.clone()
    changed[seen] = torch.where(found < 0, found * penalty, found / penalty)
    return changed


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """[..., vocabulary]; all but the k highest become -inf. Those equal to the k-th stay too."""
    least = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """[..., vocabulary]; a token goes when those likelier than it have more than p together. The likeliest always stays."""
    ordered, places = logits.sort(-1, descending=True)
    above = ordered.softmax(-1).cumsum(-1) > p
    gone = torch.cat((torch.zeros_like(above[..., :1]), above[..., :-1]), -1)
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf)


@dataclass(frozen=True)
class Likelihood:
    """How likely a chosen token was, of the raw logits."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, best first."""


def likelihood(logits: Tensor, token: int, top: int) -> Likelihood:
    """logits float32 [vocabulary]."""
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(top)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Likelihood(float(log_probs[token]), tuple(pairs))
