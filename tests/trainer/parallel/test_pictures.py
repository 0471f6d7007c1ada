"""Vectors in the places of tokens: every layout trains on them as one process does, and as on the tokens of these vectors."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.pictures import Pictures, in_order
from tests.trainer.parallel.small import (
    FULL,
    SELECTIVE,
    Case,
    Trained,
    batches,
    make_engine,
    weights_of,
)
from tests.trainer.parallel.small_pictures import own_batches
from tests.trainer.parallel.worlds import World


def train(_rank: int, case: Case) -> Trained:
    """Train on one rank."""
    engine = make_engine(case)
    reports = []
    for number in range(case.steps):
        own = own_batches(case, number, engine)
        reports.append(engine.train_step(own, lr=1e-3, weight_decay=0.1))
    engine.finish()
    engine.grid.close()
    return Trained(reports, weights_of(engine))


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE, steps=3),
        Case("qwen3", pp=2, vpp=2, recompute=FULL, steps=3),
        Case("qwen3", cp=2, dp=2, distributed=True, zero=3, steps=3),
        Case("mimo", pp=2, cp=2, steps=3),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(case.world, train, case):
        for one, other in zip(expected.reports, found.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert one.others == pytest.approx(other.others, rel=1e-5)


def as_vectors(batches: Iterator[Microbatch], engine: Engine) -> Iterator[Microbatch]:
    """The microbatches with other tokens in some places, where the vectors of the own ones are."""
    (table,) = (weight for name, weight in weights_of(engine).items() if "word_embeddings" in name)
    for batch in batches:
        places = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(3)) < 0.4
        vectors = table[batch.tokens[places]]
        tokens = batch.tokens.masked_fill(places, 7)
        yield replace(batch, tokens=tokens, pictures=Pictures(places, vectors))


@pytest.mark.parametrize("model", ["qwen3", "mimo", "delta nets, experts"])
def test_vectors_count_as_the_tokens_whose_embeddings_they_are(model: str) -> None:
    """Also in layers that predict further tokens, which embed the tokens behind the places, and in packed rows."""
    case = Case(model)
    engine = make_engine(case)
    of_vectors = engine.train_step(
        list(as_vectors(batches(case, 0), engine)), lr=0.0, weight_decay=0.0
    )
    of_tokens = make_engine(case).train_step(list(batches(case, 0)), lr=0.0, weight_decay=0.0)
    assert of_vectors.loss == pytest.approx(of_tokens.loss, rel=1e-6)
    assert of_vectors.others == pytest.approx(of_tokens.others, rel=1e-6)
    # The places have no gradient for their tokens.
    assert of_vectors.grad_norm < of_tokens.grad_norm


@pytest.mark.parametrize("repeated", [False, True])
def test_some_sequences_have_their_images_of_all(repeated: bool) -> None:
    places = torch.tensor(
        [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool
    )
    rows = in_order(places) % 2 if repeated else None
    count = 2 if repeated else 5
    pictures = Pictures(places, torch.rand(count, 3), (torch.rand(count, 3),), rows)
    whole = pictures.spread()
    if repeated:
        assert torch.equal(whole.vectors[2, 3], whole.vectors[0, 1])
    assert not whole.vectors[~places].any()
    for first in (0, 1):
        sequences = slice(first, None, 2)
        found = pictures.of(sequences).spread()
        assert torch.equal(found.places, whole.places[sequences])
        assert torch.equal(found.vectors, whole.vectors[sequences])
        assert torch.equal(found.further[0], whole.further[0][sequences])
