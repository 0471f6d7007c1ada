"""The search leaves no layout out: it finds what brute force finds, and the published layouts of known models."""

from itertools import product

import pytest

from benchmarks.planner import estimate_of, runs_of, set_ups, wanted_of
from benchmarks.published_runs import Published
from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.planning.estimate import Estimate, Estimator
from megaconv.planning.gpus import GIB, GPUS
from megaconv.planning.layer_costs import Machine
from megaconv.planning.recomputation import Recompute
from megaconv.planning.run import Run
from megaconv.planning.search import Wanted, best_of_each, candidates, search
from megaconv.planning.splits import even_stages, head_layers
from tests.planning.models import DEEPSEEK, LLAMA

H100 = Machine(GPUS["h100"])
GPU_COUNT, SEQUENCE, BATCH = 8, 2048, 16


def by_brute_force(config: ModelConfig) -> list[Estimate]:
    """All combinations of all sizes up to the GPUs, most of which are not possible."""
    estimator, sizes, found = Estimator(config, H100), range(1, GPU_COUNT + 1), list[Estimate]()
    powers = (1, 2, 4, 8)
    ways = product(powers, (1, 2), sizes, range(1, 9), powers, (1, 2, 4, 8), (1, 2, 4, 8))
    for tp, cp, pp, vpp, ep, etp, micro_batch in ways:
        dp, rest = divmod(GPU_COUNT, tp * cp * pp)
        if rest or not dp or BATCH % (micro_batch * dp) or ep > max(1, config.experts.count):
            continue
        if etp not in ({1, tp} if config.experts.count else {1}) or tp * cp * dp % (ep * etp):
            continue
        if vpp > 1 and (
            pp == 1 or BATCH // (micro_batch * dp) % pp or pp * vpp > config.layer_count
        ):
            continue
        split = even_stages(config.layer_count, pp * vpp, head_layers(config))
        if pp > config.layer_count:
            continue
        shardings = ("optim", "optim_grads", "optim_grads_params")
        for recompute, sharding in product((None, "selective", "full"), shardings):
            if pp > 1 and sharding != "optim":
                continue
            run = Run(
                config=config, layout=Layout(tp, pp, vpp, ep, etp, stage_layers=split), dp=dp, cp=cp, seq=SEQUENCE,
                micro_batch=micro_batch, global_batch=BATCH, sequence_parallel=tp > 1, recompute=Recompute(recompute),
                sharding=sharding,
            )  # fmt: skip
            try:
                found.append(estimator.estimate(run))
            except LayoutError:
                continue
    return found


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_the_search_finds_what_brute_force_finds(config: ModelConfig) -> None:
    every = by_brute_force(config)
    sizes = sorted(one.memory.total for one in every)
    half = int(sizes[len(sizes) // 2])
    wanted = Wanted(gpus=GPU_COUNT, seq=SEQUENCE, global_batch=BATCH, memory=half)
    found, tried = search(config, wanted, H100)
    fitting = [one for one in every if one.memory.total <= wanted.memory]
    assert 0 < len(fitting) < len(every)
    assert tried == len(every)
    assert len(found) == len(fitting)
    assert {one.run for one in found} == {one.run for one in fitting}
    times = [one.time.total for one in found]
    assert times == sorted(times)
    assert times[0] == min(one.time.total for one in fitting)


def test_a_fixed_size_leaves_the_other_sizes_out() -> None:
    wanted = Wanted(gpus=8, seq=2048, global_batch=16, memory=80 * GIB, fixed={"tp": 2, "vpp": 2})
    found, _ = search(LLAMA, wanted, H100)
    assert found
    assert {(one.run.layout.tp, one.run.layout.vpp) for one in found} == {(2, 2)}
    assert len(best_of_each(found)) < len(found)


@pytest.mark.parametrize("published", list(set_ups()), ids=lambda published: published.name)
def test_published_layouts_are_found_and_fit(published: Published) -> None:
    theirs = estimate_of(published)
    assert theirs.memory.total <= GPUS[published.gpu].memory
    wanted = wanted_of(published)
    sizes = {"tp": published.tp, "pp": published.pp, "ep": published.ep, "cp": published.cp}
    fixed = Wanted(**{**vars(wanted), "fixed": sizes})
    layouts = {run.layout for run in candidates(published.config, fixed, GPUS[published.gpu])}
    assert layouts & {run.layout for run in runs_of(published)}


@pytest.mark.parametrize(
    ("layers", "stages", "head", "split"),
    [
        (8, 4, 1, (2, 2, 2, 2)),
        (126, 16, 1, (7, *(8,) * 14, 7)),
        (61, 16, 4, (4,) * 15 + (1,)),
        (7, 4, 1, (2, 2, 2, 1)),
    ],
)
def test_uneven_stages_hold_all_layers_and_spare_the_ends(
    layers: int, stages: int, head: int, split: tuple[int, ...]
) -> None:
    found = even_stages(layers, stages, head)
    assert sum(found) == layers
    assert found == split
