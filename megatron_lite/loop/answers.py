"""The model's answer to the first training example, to compare it before and after the training."""

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from megatron_lite.data.samples import Sample
from megatron_lite.loop.run import Run
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.objective import Objective
from megatron_lite.parallel import comm

LONGEST_ANSWER = 24
"""The number of tokens."""
PROMPT = 8
"""Tokens of the prompt if the whole example is learned."""
LONGEST_PROMPT = 256
UNIT = 64
"""The model computes a multiple of this number of tokens, with padding at the end."""


@dataclass(frozen=True)
class Question:
    """The beginning of an example, and how it continues."""

    prompt: list[int]
    expected: list[int]


def question(run: Run) -> Question | None:
    """Return the first example that the run learns, cut in two; None if the objective is not to predict the next token."""
    dataset = run.datasets[0]
    if type(run.objective) is not Objective or dataset is None or run.config.encoder.layers:
        return None
    sample = dataset[0]
    return _cut(sample) if isinstance(sample, Sample) else None


def _cut(sample: Sample) -> Question | None:
    inside = sample.documents == sample.documents[0]
    tokens, labels = sample.tokens[inside], sample.labels[inside]
    learned = sample.loss_mask[inside].nonzero()[0]
    if not len(learned):
        return None
    first, last = int(learned[0]), int(learned[-1])
    if first == 0:
        first = min(PROMPT, last)
    begin = max(0, first + 1 - LONGEST_PROMPT)
    prompt = tokens[begin : first + 1].tolist()
    expected = labels[first : min(last + 1, first + LONGEST_ANSWER)].tolist()
    return Question(prompt, expected)


def answer(run: Run, asked: Question) -> list[int]:
    """Return the most probable continuation, up to LONGEST_ANSWER tokens. Collective."""
    found: list[int] = []
    while len(found) < LONGEST_ANSWER:
        token = _next_token(run, [*asked.prompt, *found])
        found.append(token)
        if token == run.tokenizer.eod:
            break
    return found


def _next_token(run: Run, tokens: list[int]) -> int:
    """Return the most probable next token. Collective: the last stage computes it, and all ranks get it."""
    grid = run.engine.grid
    unit = lcm(UNIT, 2 * grid.cp * grid.layout.tp)
    length = -(-len(tokens) // unit) * unit
    row = torch.zeros(1, length, dtype=torch.int64, device=grid.device)
    row[0, : len(tokens)] = torch.tensor(tokens, device=grid.device)
    logits = run.engine.logits(Microbatch(row, row))
    best = _best(logits, len(tokens) - 1, run.vocab, grid.device)
    world = grid.group("world")
    if world is not None:
        comm.largest(best, world)
    return int(best)


def _best(logits: Tensor | None, position: int, vocab: int, device: torch.device) -> Tensor:
    """Return the token with the largest logit, or -1 on stages without logits: int64 []."""
    if logits is None:
        return torch.tensor(-1, device=device)
    return logits[0, position, :vocab].argmax()
