"""Small reward models and their pairs of answers, at any layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.score_loss import MARGIN, ScoreLoss
from megatron_lite.objectives.scored_model import scored
from tests.trainer.parallel import small
from tests.trainer.parallel.small import CPU, MICROBATCHES, MODELS, SEQUENCE, Case

PAIRS = 3
"""Pairs of answers of a microbatch."""


@dataclass(frozen=True)
class RewardCase(Case):
    """A run on pairs of answers."""

    center: float = 0.05
    """Coefficient of the squared sum of a pair's scores."""
    margins: bool = True


def make_engine(case: RewardCase, *, device: torch.device = CPU) -> Engine:
    """Make a rank's engine: the case's model with a head for one score, and with fresh adapters if the case has some."""
    config = scored(MODELS[case.model], case.model)
    engine = small.make_engine(case, device=device, config=config, criterion=ScoreLoss(case.center))
    if engine.options.lora is not None:
        init_adapters(engine, seed=7)
    return engine


def _pairs(case: RewardCase, step: int, index: int) -> Microbatch:
    """Return a microbatch. In the first one of a step, all answers end in the first quarter of their rows."""
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(MODELS[case.model].vocab, (2 * PAIRS, SEQUENCE), generator=generator)
    longest = SEQUENCE if index else SEQUENCE // 4
    lengths = torch.randint(1, longest + 1, (2 * PAIRS, 1), generator=generator)
    last = torch.arange(SEQUENCE) == lengths - 1
    extras: dict[str, Tensor] = {}
    if case.margins:
        extras[MARGIN] = torch.rand(PAIRS, generator=generator)
    return Microbatch(tokens, tokens, last.float(), extras=extras, index=index)


def own_batches(case: RewardCase, step: int, engine: Engine) -> list[Microbatch]:
    """Return the microbatches of this data-parallel rank."""
    every = [_pairs(case, step, index) for index in range(MICROBATCHES)]
    return every[engine.grid.dp_rank :: case.dp]
