"""The estimated time of activation offload: only copies that no computation hides take time."""

from dataclasses import replace

import pytest

from megaconv.model.config import ModelConfig
from megaconv.planning.activations import activations, offloaded_bytes
from megaconv.planning.estimate import Estimate, Estimator
from megaconv.planning.gpus import GPUS, Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.offload import copy_seconds, waiting_seconds
from megaconv.planning.rates import LINKS
from megaconv.planning.run import Run
from tests.planning.models import DEEPSEEK, LLAMA, run_of

H100 = GPUS["h100"]


def estimate(run: Run, gpu: Gpu = H100) -> Estimate:
    return Estimator(run.config, Machine(gpu)).estimate(run)


def with_link(speed: float) -> Gpu:
    return replace(H100, host=speed)


@pytest.mark.parametrize(
    ("layers", "copies", "waiting"),
    [
        ([3.0] * 6, [], 0.0),
        # A forward pass of 1 s and a backward pass of 2 s hide copies of 1 s.
        ([3.0] * 6, [1.0] * 4, 0.0),
        # Forward: layer 2 waits 1 s for layer 0's copy (0 to 3 s). Backward: the copy back takes 3 s, and 2 s are hidden.
        ([3.0] * 6, [3.0], 2.0),
        # Forward: copies end at 3, 6 and 9 s, layers 2, 3 and 4 wait 1, 2 and 2 s. Backward: each copy back waits 1 s.
        ([3.0] * 6, [3.0] * 3, 8.0),
        # The last two layers never leave the GPU, so only layer 0's copies are waited for.
        ([3.0] * 3, [3.0] * 2, 2.0),
        ([3.0] * 2, [3.0], 0.0),
    ],
)  # fmt: skip
def test_waiting_is_that_of_timelines_by_hand(
    layers: list[float], copies: list[float], waiting: float
) -> None:
    assert waiting_seconds(layers, 0.0, copies) == pytest.approx(waiting)


def test_copies_that_are_under_way_after_the_forward_pass_run_behind_the_head() -> None:
    """Layer 1's copy ends at 15 s. Layer 0 can't come back earlier than at 18 s, since both use the same link."""
    layers, copies = [3.0] * 3, [3.0, 12.0]
    assert waiting_seconds(layers, 0.0, copies) == pytest.approx(11.0)
    assert waiting_seconds(layers, 9.0, copies) == pytest.approx(2.0)


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_the_time_of_copies_follows_from_bytes_and_the_links_bandwidth(
    config: ModelConfig,
) -> None:
    run = run_of(config, 2, 1, 1, (config.layer_count,), offloaded=3)
    assert sum(copy_seconds(run, H100)) == pytest.approx(
        offloaded_bytes(run) / (64e9 * LINKS), rel=1e-6
    )


def test_a_link_that_is_fast_enough_adds_no_time_and_a_slow_one_adds_both_ways() -> None:
    run = run_of(LLAMA, 1, 1, 1, (8,), offloaded=4)
    resident = estimate(replace(run, offloaded=0)).time
    fast = estimate(run, with_link(1e15)).time
    slow = estimate(run, with_link(1e9)).time
    assert fast.copies == pytest.approx(0.0, abs=1e-9)
    assert fast.total == pytest.approx(resident.total)
    assert slow.copies == pytest.approx(slow.total - resident.total)
    assert slow.communication - resident.communication == pytest.approx(slow.copies)
    # With almost nothing hidden, every byte crosses the link twice in each microbatch.
    crossing = 2 * run.microbatches * offloaded_bytes(run) / (1e9 * LINKS)
    assert 0.95 * crossing < slow.copies < crossing


def test_more_offloaded_layers_take_less_memory_and_no_less_time() -> None:
    gpu = with_link(16e9)
    runs = [run_of(LLAMA, 1, 1, 1, (8,), offloaded=layers) for layers in (0, 3, 5, 7)]
    found = [estimate(run, gpu) for run in runs]
    memory = [one.memory.activations for one in found]
    times = [one.time.total for one in found]
    assert memory == sorted(memory, reverse=True)
    assert times == sorted(times)
    assert times[0] < times[-1]
    for run, one in zip(runs, found, strict=True):
        assert one.memory.activations == pytest.approx(activations(run, 0), rel=1e-6)


def test_runs_with_and_without_offload_do_not_share_costs() -> None:
    """One estimator, which remembers the costs of earlier runs."""
    estimator = Estimator(LLAMA, Machine(with_link(1e9)))
    run = run_of(LLAMA, 1, 1, 1, (8,))
    first = estimator.estimate(run)
    offloaded = estimator.estimate(replace(run, offloaded=4))
    assert offloaded.time.copies > 0
    assert estimator.estimate(run) == first
