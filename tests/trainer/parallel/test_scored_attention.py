"""Capped scores, chunks, temperature and chosen keys: every layout trains as one process does."""

from dataclasses import replace

import pytest

from tests.trainer.parallel.small import FULL, SELECTIVE, Case
from tests.trainer.parallel.test_layouts import compare
from tests.trainer.parallel.worlds import World

NAMES = ("gemma2", "llama4", "deepseek_v32")
LAYOUTS = [
    *(Case(name, cp=2, options=(("context", "p2p"),)) for name in NAMES),
    *(Case(name, tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE) for name in NAMES),
    Case("gemma2", tp=2, dp=2, recompute=FULL),
    Case("llama4", pp=2, vpp=2, recompute=FULL),
    Case("deepseek_v32", pp=2, dp=2, distributed=True, recompute=FULL),
]
SLOW = [
    Case(name, tp=2, cp=2, sequence_parallel=True, options=(("context", how),))
    for name in NAMES
    for how in ("p2p", "all_gather")
] + [Case(name, cp=2, options=(("context", "a2a"),)) for name in NAMES]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    """Some sequences consist of documents."""
    compare(replace(case, steps=3), world)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more_layouts_train_as_one_process_does(case: Case, world: World) -> None:
    compare(replace(case, steps=4), world)
