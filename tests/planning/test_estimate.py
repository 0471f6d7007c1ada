"""Estimates: what is looked up in sums over layers equals what is counted layer by layer, and the schedule's bubble."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from megaconv.families import family
from megaconv.model.rank_share import rank_shares
from megaconv.planning.activations import activations
from megaconv.planning.bubble import bubble
from megaconv.planning.estimate import Estimator
from megaconv.planning.flags import megatron_lite_flags, megatron_lm_flags
from megaconv.planning.gpus import GPUS
from megaconv.planning.in_flight import peaks
from megaconv.planning.layer_costs import Machine
from megaconv.planning.pipeline_order import order
from megaconv.planning.recomputation import Recompute
from megaconv.planning.run import Run
from tests.planning.models import DEEPSEEK, LLAMA, MODELS, run_of

H100 = Machine(GPUS["h100"])
SPLITS = {
    8: [(1, 1, (8,)), (2, 1, (4, 4)), (4, 2, (1,) * 8), (2, 2, (3, 2, 2, 1)), (3, 1, (3, 3, 2))],
    7: [(1, 1, (7,)), (2, 1, (4, 3)), (2, 2, (2, 2, 2, 1)), (4, 1, (2, 2, 3, 0))],
}
"""Layers -> (pp, vpp, layers of the stages)."""


def runs() -> Iterator[Run]:
    for config, tp, recompute in product(MODELS.values(), (1, 2), (None, "selective", "full")):
        for pp, vpp, stages in SPLITS[config.layer_count]:
            global_batch = 48 if pp == 3 else 64
            yield run_of(
                config,
                tp,
                pp,
                vpp,
                stages,
                recompute=Recompute(recompute),
                global_batch=global_batch,
            )


def test_activations_are_those_that_are_counted_pass_by_pass() -> None:
    """The test counts every rank. The estimate computes ranks of equal contents once."""
    for run in runs():
        found = Estimator(run.config, H100).estimate(run).memory.activations
        each = [activations(run, rank) for rank in range(run.layout.pp)]
        stages = Estimator(run.config, H100).stages(run)
        assert {stage.rank for stage in stages} <= set(range(run.layout.pp))
        assert sum(stage.ranks for stage in stages) == run.layout.pp
        assert any(found == pytest.approx(counted, rel=1e-6) for counted in each)


def test_parameters_of_stages_are_those_of_the_table() -> None:
    for run in runs():
        rows = family(run.config.family).rows
        shares = rank_shares(rows, run.config, run.layout, run.vocab_rows)
        for stage in Estimator(run.config, H100).stages(run):
            assert stage.share == shares[stage.rank]


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(1, 1, 3), (4, 1, 9), (4, 2, 8), (4, 3, 48)]
)
def test_the_moments_of_most_activations_are_found(pp: int, vpp: int, microbatches: int) -> None:
    """For any sizes of the chunks, no moment of the whole order keeps more."""
    random = Random(1)
    for rank, _ in product(range(pp), range(20)):
        kept = [random.random() for _ in range(vpp)]
        now = most = 0.0
        for action in order(pp, vpp, microbatches, rank):
            now += -kept[action.chunk] if action.backward else kept[action.chunk]
            most = max(most, now)
        found = max(
            sum(count * each for count, each in zip(counts, kept, strict=True))
            for counts in peaks(pp, vpp, microbatches, rank)
        )
        assert found == pytest.approx(most)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (4, 2)])
def test_the_bubble_of_equal_stages_is_that_of_the_schedule(pp: int, vpp: int) -> None:
    run = run_of(LLAMA, 1, pp, vpp, (8 // (pp * vpp),) * (pp * vpp))
    stages = Estimator(LLAMA, H100).stages(run)
    seconds = [stage.microbatch.seconds for stage in stages]
    # The first and the last stage also hold the embedding and the head.
    assert max(seconds) == pytest.approx(min(seconds), rel=0.5)
    time = Estimator(LLAMA, H100).estimate(run).time
    idle = time.bubble / (time.bubble + run.microbatches * max(seconds))
    assert idle == pytest.approx(
        bubble(pp, vpp, run.microbatches, run.layout.stage_layers), abs=0.05
    )


def test_sharding_more_takes_less_memory_and_no_less_time() -> None:
    found = [
        Estimator(LLAMA, H100).estimate(run_of(LLAMA, 1, 1, 1, (8,), sharding=sharding))
        for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    ]
    state = [one.memory.weights + one.memory.gradients + one.memory.optimizer for one in found]
    assert state == sorted(state, reverse=True)
    assert state[0] / state[3] == pytest.approx(4), "18 bytes a parameter, shared by four ranks"
    assert found[3].time.total >= found[1].time.total


@pytest.mark.parametrize("sharding", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_exchanges_without_overlap_hide_behind_no_pass(sharding: str) -> None:
    run = run_of(LLAMA, 1, 1, 1, (8,), sharding=sharding)
    apart = replace(run, overlaps_reduce=False, overlaps_gather=False)
    hidden, exposed = (
        Estimator(LLAMA, H100).estimate(each).time.communication for each in (run, apart)
    )
    assert exposed > hidden


@pytest.mark.parametrize("flags_of", [megatron_lm_flags, megatron_lite_flags])
def test_flags_ask_for_the_overlap_that_the_estimate_has(
    flags_of: Callable[[Run], list[str]],
) -> None:
    run = run_of(LLAMA, 1, 1, 1, (8,), sharding="optim")
    both = {"--overlap-grad-reduce", "--overlap-param-gather"}
    assert both <= set(flags_of(run))
    assert both & set(flags_of(replace(run, sharding="no_shard"))) == {"--overlap-grad-reduce"}
    assert not both & set(flags_of(replace(run, dp=1)))


def test_recomputing_more_takes_less_memory_and_more_time() -> None:
    kept, selective, full = (
        Estimator(LLAMA, H100).estimate(
            run_of(LLAMA, 2, 2, 1, (4, 4), recompute=Recompute(granularity))
        )
        for granularity in (None, "selective", "full")
    )
    assert kept.memory.activations > selective.memory.activations > full.memory.activations
    assert kept.time.total < selective.time.total < full.time.total


def test_adapters_take_neither_gradients_nor_state_of_the_weights() -> None:
    run = run_of(LLAMA, 1, 1, 1, (8,))
    whole = Estimator(LLAMA, H100).estimate(run)
    adapters = Estimator(LLAMA, H100._replace(frozen=True)).estimate(run)
    assert adapters.memory.optimizer < whole.memory.optimizer / 4
    assert adapters.time.compute < 0.8 * whole.time.compute


def test_a_slower_link_makes_experts_slower_and_nothing_else() -> None:
    run = run_of(DEEPSEEK, 1, 1, 1, (7,))
    fast, slow = (
        Estimator(DEEPSEEK, Machine(GPUS[name])).estimate(run).time for name in ("h100", "h800")
    )
    assert slow.communication > fast.communication
    assert (slow.compute, slow.memory) == (fast.compute, fast.memory)
