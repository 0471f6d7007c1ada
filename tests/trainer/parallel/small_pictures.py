"""The microbatches of small models, with images in their sequences."""

from dataclasses import replace

import torch

from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.pictures import Pictures
from tests.trainer.parallel.small import ROWS, SEQUENCE, Case, batches

HIDDEN, PAIRS = 32, 4


def with_pictures(batch: Microbatch) -> Microbatch:
    """The microbatch with images in two places of each row, which have further vectors and positions of their own."""
    generator = torch.Generator().manual_seed(batch.index)
    places = torch.zeros(ROWS, SEQUENCE, dtype=torch.bool)
    places[0, 2:6] = places[1, 7:12] = True

    def vectors() -> torch.Tensor:
        return torch.randn(int(places.sum()), HIDDEN, generator=generator)

    positions = torch.arange(SEQUENCE)[None]
    of_pairs = torch.randint(SEQUENCE, (ROWS, SEQUENCE, PAIRS), generator=generator)
    pictures = Pictures(places, vectors(), (vectors(), vectors(), vectors()))
    return replace(batch, positions=positions, pair_positions=of_pairs, pictures=pictures)


def own_batches(case: Case, step: int, engine: Engine) -> list[Microbatch]:
    """The microbatches of this data-parallel rank."""
    whole = [with_pictures(batch) for batch in batches(case, step)]
    return whole[engine.grid.dp_rank :: case.dp]
