"""Heads and experts whose widths the GPU's kernels refuse: other operations compute them, or one error says what to do."""

from typing import Any, NamedTuple

import pytest

from megaconv.errors import UsageError
from megaconv.model.fields import fields_of, from_fields
from tests.trainer.parallel.small import FULL, MODELS, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, require_same

RING = ("context", "p2p")


class Shape(NamedTuple):
    """A case, and the changes of its model."""

    case: Case
    changes: dict[str, Any]


SHAPES = {
    "packed heads of 12": Shape(Case("qwen3", options=(BF16,)), {"attention.head_dim": 12}),
    "packed heads of 264": Shape(Case("qwen3", options=(BF16,)), {"attention.head_dim": 264}),
    "experts of 12": Shape(Case("mixtral", options=(BF16,)), {"experts.ffn": 12}),
    "experts of 12, recomputed": Shape(
        Case("mixtral", recompute=FULL, options=(BF16,)), {"experts.ffn": 12}
    ),
    "rings with heads of 12": Shape(
        Case("qwen3", cp=2, options=(BF16, RING)), {"attention.head_dim": 12}
    ),
}
QUICK = ("packed heads of 12", "experts of 12")


def _take_steps(rank: int, case: Case, changes: dict[str, Any]) -> Steps:
    """Train the model with other sizes. Later tasks of the process get the model of before."""
    before = MODELS[case.model]
    MODELS[case.model] = from_fields(before.family, fields_of(before) | changes)
    try:
        return take_steps(rank, case)
    finally:
        MODELS[case.model] = before


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, shape in SHAPES.items()
    ],
)
def test_widths_that_a_kernel_refuses_train_as_on_a_cpu(
    gpu_world: PretendedWorld, shape: Shape
) -> None:
    for steps in gpu_world.run(shape.case.world, _take_steps, shape.case, shape.changes):
        require_same(steps, of_loss=1e-2, of_norm=5e-2)
        assert not steps.unpinned


def _ring_of_wide_heads(rank: int) -> str:
    case = Case("qwen3", cp=2, options=(BF16, RING))
    try:
        _take_steps(rank, case, {"attention.head_dim": 264})
    except UsageError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
def test_rings_refuse_heads_that_are_too_wide(gpu_world: PretendedWorld) -> None:
    for refusal in gpu_world.run(2, _ring_of_wide_heads):
        assert "heads of at most 256 elements on a GPU, but these have 264" in refusal
