"""Compiled layers: like layers share their graphs, and later steps compile nothing, with tensor parallelism and experts too."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_lite.models.batch import Microbatch
from megatron_lite.products.accumulating import GradientSum
from megatron_lite.settings.options import LoRA
from tests.trainer.parallel import small_pictures
from tests.trainer.parallel.small import SELECTIVE, Case, make_engine, own_batches
from tests.trainer.parallel.worlds import World

STEPS = 3
COMPILED = (("compile", True),)
CASES = {
    "tensor parallel": (Case("llama", tp=2, sequence_parallel=True), 5),
    "experts": (Case("mixtral", tp=2, ep=2, sequence_parallel=True), 7),
    "sharded parameters": (Case("qwen3", dp=2, distributed=True, zero=3), 4),
    "latent attention, recomputed": (Case("deepseek_v3", recompute=SELECTIVE), 12),
    "adapters": (Case("llama", options=(("lora", LoRA(rank=2, alpha=4.0)),)), 8),
    "DoRA": (Case("llama", options=(("lora", LoRA(2, 4.0, dora=True)),)), 8),
    "DoRA, tensor parallel": (
        Case("llama", tp=2, sequence_parallel=True, options=(("lora", LoRA(2, 4.0, dora=True)),)),
        8,
    ),
}
"""A case, and the number of graphs that it may have: for rows of one document, and for packed rows.

The first layer's input has no gradient if only adapters are trained, so that it has graphs of its own.

A packed row's attention is not compiled, so that a layer has a graph before it and one behind it. The same holds for
a mixture of experts, whose activation is a graph too.
"""


class Made(NamedTuple):
    """The result of one step."""

    loss: float
    graphs: int
    """The number of graphs so far."""
    additions: int
    """Products that were added to the sum of a weight's gradients."""


def _steps(
    _rank: int, case: Case, backend: str, batches: Callable[..., list[Microbatch]] = own_batches
) -> list[Made]:
    torch.compiler.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        engine = make_engine(case)
    found = []
    for number in range(STEPS):
        with mock.patch.object(
            GradientSum, "add", autospec=True, side_effect=GradientSum.add
        ) as add:
            own = batches(case, number, engine)
            loss = engine.train_step(own, lr=1e-3, weight_decay=0.1).loss
        found.append(Made(loss, counters["stats"]["unique_graphs"], add.call_count))
    engine.finish()
    engine.grid.close()
    return found


@pytest.mark.slow
def test_layers_that_add_to_images_share_their_graphs() -> None:
    """Of four layers, the first three add further vectors, each its own."""
    case = Case("qwen3", masked=False, options=COMPILED)
    found = _steps(0, case, "aot_eager", small_pictures.own_batches)
    assert found[-1].graphs == found[0].graphs <= 3


@pytest.mark.slow
@pytest.mark.parametrize(("case", "most"), CASES.values(), ids=CASES)
def test_no_later_step_compiles_and_like_layers_share_their_graphs(
    world: World, case: Case, most: int
) -> None:
    """The backend runs the traced graphs. Sequences and documents differ from step to step."""
    options = (*case.options, *COMPILED)
    compiled = world.run(case.world, _steps, replace(case, options=options), "aot_eager")
    plain = world.run(case.world, _steps, case, "aot_eager")
    for found, expected in zip(compiled, plain, strict=True):
        graphs = [each.graphs for each in found]
        assert graphs[0] == graphs[-1] <= most
        losses = [each.loss for each in expected]
        assert [each.loss for each in found] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case("gpt2"), CASES["tensor parallel"][0]],
    ids=["biases", "tensor parallel"],
)
def test_compiled_layers_add_as_many_products_to_sums_of_gradients(
    world: World, case: Case
) -> None:
    compiled = world.run(case.world, _steps, replace(case, options=COMPILED), "aot_eager")
    plain = world.run(case.world, _steps, case, "aot_eager")
    for found, expected in zip(compiled, plain, strict=True):
        assert [each.additions for each in found] == [each.additions for each in expected]
        losses = [each.loss for each in expected]
        assert [each.loss for each in found] == pytest.approx(losses, rel=1e-5)
        assert found[0].additions


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs the compiler g++")
def test_compiled_code_of_like_layers_is_made_once(world: World) -> None:
    """The compiler itself runs: one forward and one backward pass for four layers and all steps."""
    case = Case("llama", tp=2, sequence_parallel=True, masked=False)
    for found in world.run(2, _steps, replace(case, options=COMPILED), "inductor"):
        assert [each.graphs for each in found] == [1] * STEPS
