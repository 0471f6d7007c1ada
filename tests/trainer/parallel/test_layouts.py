"""Every layout trains as one process does: the same losses, the same norms of all gradients, the same weights."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.trainer.parallel.small import BLOCK, FULL, NONE, SELECTIVE, Case, Trained, train
from tests.trainer.parallel.worlds import World

TOLERANCE = 1e-5
"""Relative; found are 1e-6 and less."""
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4},
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"pp": 2, "dp": 2},
    {"pp": 2, "vpp": 2, "dp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
]
COVERING = [
    Case("qwen3", dp=4),
    Case("qwen3", tp=2, dp=2, distributed=True, recompute=SELECTIVE),
    Case("qwen3", tp=2, dp=2, sequence_parallel=True, distributed=True, recompute=FULL),
    Case("gpt2", tp=2, dp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("gpt2", pp=2, dp=2, distributed=True, recompute=BLOCK),
    Case("llama", pp=2, vpp=2, dp=2, recompute=FULL),
    Case("llama", pp=4, clip=0.0),
    Case("llama", tp=2, pp=2, sequence_parallel=True, distributed=True, recompute=SELECTIVE),
    Case("qwen3", tp=2, pp=2, vpp=2, kind="sgd"),
    Case("gpt2", dp=4, distributed=True),
    Case("gemma3", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("gemma4", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("gemma4", pp=2, vpp=2, dp=2, distributed=True, recompute=FULL),
    Case("gemma4, layer inputs", pp=2, dp=2, distributed=True, zero=3, recompute=FULL),
    Case("gemma4, layer inputs", tp=2, pp=2, vpp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("mimo_v2_flash", tp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("nemotron_nas", pp=2, vpp=2, recompute=FULL),
    Case("laguna", tp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("step3p5", pp=2, dp=2, distributed=True, recompute=FULL),
    Case("lfm3", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("olmo2", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("olmo2", tp=2, cp=2),
    Case("kimi", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("kimi", dp=2, ep=2, distributed=True, zero=3),
    Case("falcon h1", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("apertus", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("apertus", tp=2, dp=2, distributed=True, zero=3, recompute=FULL),
]
EVERY = [
    Case(model, distributed=distributed, recompute=recompute, **layout)
    for model, layout, distributed, recompute in product(
        ("qwen3", "gpt2"), LAYOUTS, (False, True), (NONE, FULL, BLOCK, SELECTIVE)
    )
]
EVERY += [
    Case(model, recompute=recompute, **layout)
    for model, (layout, recompute) in product(
        ("mimo_v2_flash", "nemotron_nas", "laguna", "step3p5"),
        [
            ({"tp": 2, "pp": 2, "sequence_parallel": True}, SELECTIVE),
            ({"pp": 2, "vpp": 2, "dp": 2, "distributed": True}, FULL),
        ],
    )
]


@cache
def alone(case: Case, world: World) -> Trained:
    """The result of one process with as many threads."""
    (found,) = world.run(1, train, case)
    assert isinstance(found, Trained)
    return found


def compare(case: Case, world: World, tolerance: float = TOLERANCE) -> None:
    expected = alone(case.alone(), world)
    for found in world.run(case.world, train, case):
        for one, other in zip(found.reports, expected.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=tolerance)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=tolerance)
            assert one.tokens == other.tokens


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    compare(replace(case, steps=3), world)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    compare(case, world)


PIPELINES = [
    Case("qwen3", pp=2),
    Case("gpt2, untied", pp=2, vpp=2),
    Case("qwen3", pp=4, recompute=FULL),
]


@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_a_pipeline_computes_the_bits_of_one_process(case: Case, world: World) -> None:
    """Losses and weights, where nothing is summed in another order: untied, and without clipping by the norm."""
    case = replace(case, clip=0.0, steps=3)
    expected = alone(case.alone(), world)
    weights: dict[str, torch.Tensor] = {}
    for found in world.run(case.world, train, case):
        assert found.losses == expected.losses
        weights |= found.weights
    assert set(weights) == set(expected.weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.weights.items())


def test_the_same_run_twice_gives_the_same_bits(world: World) -> None:
    case = Case("llama", tp=2, pp=2, sequence_parallel=True, distributed=True, steps=3)
    first, second = (world.run(case.world, train, case) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.reports == other.reports
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", tp=2, dp=2, sequence_parallel=True, recompute=FULL),
        Case("gpt2", pp=2, dp=2),
    ],
    ids=str,
)
def test_dropout_is_the_same_at_every_layout(case: Case, world: World) -> None:
    case = replace(case, steps=3, options=(("hidden_dropout", 0.2),))
    compare(case, world)
    without = alone(replace(case, options=()).alone(), world)
    assert alone(case.alone(), world).losses != without.losses


def test_bf16_layouts_agree_as_far_as_bf16_does(world: World) -> None:
    """They also agree with fp32: weights and gradients are kept in fp32."""
    case = Case(
        "qwen3",
        tp=2,
        dp=2,
        sequence_parallel=True,
        distributed=True,
        options=(("dtype", "bfloat16"),),
        steps=3,
    )
    expected = alone(replace(case.alone(), options=()), world)
    for found in world.run(case.world, train, case):
        assert found.losses == pytest.approx(expected.losses, rel=3e-3)
