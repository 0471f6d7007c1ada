"""Capped scores, chunks, temperature and chosen keys: every layout trains as one process does."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.models.pictures import joint_of
from megatron_lite.models.scored_attention import Rules, Visibility
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


@pytest.mark.parametrize("window", [None, 3])
def test_joint_tokens_attend_to_each_other_in_their_document(window: int | None) -> None:
    """The rule of transformers: causal or of the same image, and within the window, and of the same document."""
    places = torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    joint = joint_of(places)
    assert joint.tolist() == [[-1, 0, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2]]
    documents = torch.tensor([[0] * 8 + [1] * 4])
    positions = torch.tensor([[*range(8), *range(4)]])
    seen = Visibility(
        positions, positions, (documents, documents), in_order=False, joint=(joint, joint)
    )
    rules = Rules(joint=True)
    keys = seen.reach(slice(4, 8), window, rules)
    parts = slice(0, 4), slice(4, 12)
    found = torch.cat([seen.block(part, keys, window, rules) for part in parts], 1)
    for query in range(12):
        for key in range(12):
            expected = key <= query or bool(joint[0, query] == joint[0, key] >= 0)
            expected &= window is None or key > query - window
            expected &= bool(documents[0, query] == documents[0, key])
            assert found[0, query, key] == expected, (query, key)
