"""Small embedding models and their queries, at any layout."""

from dataclasses import dataclass

import torch

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.pooling import pooled_tokens
from megatron_lite.objectives.contrastive_loss import DOCUMENTS, QUERIES, ContrastiveLoss
from tests.trainer.parallel import small
from tests.trainer.parallel.small import CPU, MICROBATCHES, MODELS, SEQUENCE, Case

SAMPLES, NEGATIVES = 2, 1
"""Samples of a microbatch, and hard negatives of each."""


@dataclass(frozen=True)
class VectorCase(Case):
    """A run on queries."""

    pooling: str = "last"


def make_engine(case: VectorCase, *, device: torch.device = CPU) -> Engine:
    """Make a rank's engine, with fresh adapters if the case has some."""
    engine = small.make_engine(case, device=device, criterion=ContrastiveLoss(0.1))
    if engine.options.lora is not None:
        init_adapters(engine, seed=7)
    return engine


def _queries(case: VectorCase, step: int, index: int) -> Microbatch:
    """Return a microbatch. One query of each step has no hard negative."""
    generator = torch.Generator().manual_seed(100 * step + index)
    rows = 2 + NEGATIVES
    tokens = torch.randint(
        MODELS[case.model].vocab, (SAMPLES * rows, SEQUENCE), generator=generator
    )
    lengths = torch.randint(1, SEQUENCE + 1, (SAMPLES * rows,), generator=generator)
    chosen = pooled_tokens(lengths, SEQUENCE, case.pooling)
    first = index * SAMPLES
    queries = torch.arange(first, first + SAMPLES)
    documents = 100 + torch.arange(rows - 1) + queries.unsqueeze(1) * (rows - 1)
    if index == 0:
        documents[0, 1] = -1
    extras = {QUERIES: queries, DOCUMENTS: documents}
    return Microbatch(tokens, tokens, chosen, extras=extras, index=index)


def own_batches(case: VectorCase, step: int, engine: Engine) -> list[Microbatch]:
    """Return the microbatches of this data-parallel rank."""
    every = [_queries(case, step, index) for index in range(MICROBATCHES)]
    return every[engine.grid.dp_rank :: case.dp]
