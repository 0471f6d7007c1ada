"""Gradients and parameters that data-parallel ranks shard: the same training in less memory, and the same checkpoints."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.snapshot import Snapshot, dist_snapshot
from megatron_lite.models.layer import Layer
from megatron_lite.optimizer.shards import GradientShards, OnDemand
from megatron_lite.parallel.parameter_kinds import ParametersFreed
from megatron_lite.settings.options import Recompute
from tests.trainer.parallel.small import (
    FULL,
    SELECTIVE,
    Case,
    batches,
    make_engine,
    step,
    weights_of,
)
from tests.trainer.parallel.test_layouts import compare
from tests.trainer.parallel.test_lora import Case as Adapted
from tests.trainer.parallel.test_lora import train as train_adapters
from tests.trainer.parallel.test_optimizer import live_bytes
from tests.trainer.parallel.worlds import World
from tests.trainer.simulated_nccl.groups import run_ranks

STEPS = 10
RING = (("context", "p2p"),)
LAYOUTS = [
    Case("qwen3", tp=2, dp=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("llama", cp=2, dp=2, recompute=FULL, options=RING),
    Case("mixtral", dp=4, ep=2),
    Case("hybrid", dp=2, tp=2, sequence_parallel=True),
    Case("further tokens, tied", dp=2, ep=2, recompute=FULL),
]


def sharded(case: Case, zero: int) -> Case:
    return replace(case, distributed=True, zero=zero)


@pytest.mark.parametrize("case", [sharded(LAYOUTS[2], 3), sharded(LAYOUTS[0], 2)], ids=str)
def test_ten_steps_are_those_of_one_process(case: Case, world: World) -> None:
    compare(replace(case, steps=STEPS), world)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_ten_steps_of_each_layout_are_those_of_one_process(
    case: Case, zero: int, world: World
) -> None:
    compare(replace(sharded(case, zero), steps=STEPS), world)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("llama", pp=2, vpp=2, dp=2), Case("gpt2", pp=2, dp=2)], ids=str
)
def test_parameters_are_sharded_in_a_pipeline_too(case: Case, world: World) -> None:
    compare(replace(sharded(case, 3), steps=STEPS), world)


@pytest.mark.parametrize(
    ("dtype", "dp", "zero", "promised"),
    [("bfloat16", 2, 2, 10), ("bfloat16", 4, 3, 4), ("float32", 2, 2, 10), ("float32", 2, 3, 8)],
)
def test_a_rank_keeps_as_many_bytes_as_promised(
    dtype: str, dp: int, zero: int, promised: float, world: World
) -> None:
    """2 + 16/d and 16/d for 16 bits, 4 + 12/d and 16/d for 32: all tensors that are alive after a step."""
    for found, formula in world.run(dp, live_bytes, dtype, dp, True, zero):
        assert formula == pytest.approx(promised, rel=0.01)
        assert found == pytest.approx(promised, rel=0.02)


def _most_at_a_time(_rank: int, case: Case) -> tuple[int, int, int]:
    """(buckets, most of them whose parameters exist inside a layer, most whose scratch gradients exist)."""
    engine = make_engine(case, bucket_elements=1)
    buckets = engine.buckets[0].buckets
    most = [0, 0]

    def look(*_: object) -> None:
        present = [each.on_demand.present for each in buckets]  # type: ignore[attr-defined]
        scratch = [each.scratch is not None for each in buckets]  # type: ignore[attr-defined]
        most[:] = max(most[0], sum(present)), max(most[1], sum(scratch))

    for module in engine.chunks[0].modules():
        if isinstance(module, Layer):
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
    step(engine, case, 0)
    engine.finish()
    assert not any(each.on_demand.present for each in buckets)  # type: ignore[attr-defined]
    return len(buckets), most[0], most[1]


@pytest.mark.parametrize("recompute", [Recompute(), FULL], ids=["kept", "recomputed"])
def test_parameters_of_two_units_and_gradients_of_two_buckets_exist_at_a_time(
    recompute: Recompute,
) -> None:
    """In the backward pass, the next unit is already being gathered, and the previous bucket is not yet reduced."""
    case = Case("qwen3", dp=2, distributed=True, zero=3, recompute=recompute)
    for buckets, parameters, gradients in run_ranks(2, _most_at_a_time, case):
        assert (buckets, parameters) == (7, 2)
        assert 1 <= gradients <= 2


def _one_batch_a_rank(_rank: int, case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make_engine(case)
    losses = []
    for number in range(3):
        own = list(batches(case, number))[engine.grid.dp_rank :: MICROBATCHES_OF_ALL]
        losses.append(engine.train_step(own[:1], lr=1e-3).loss)
    engine.finish()
    return losses, weights_of(engine)


MICROBATCHES_OF_ALL = 4


@pytest.mark.parametrize("zero", [2, 3])
def test_a_step_of_one_microbatch_has_the_same_bits_whatever_is_sharded(zero: int) -> None:
    """More microbatches are added up in another order: over ranks first."""
    case = Case("mixtral", dp=2, ep=2, distributed=True)
    every = run_ranks(2, _one_batch_a_rank, case)
    for (losses, weights), (more, others) in zip(
        every, run_ranks(2, _one_batch_a_rank, replace(case, zero=zero)), strict=True
    ):
        assert losses == more
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


SNAPSHOTS = {"torch": rank_snapshot, "torch_dist": dist_snapshot}


def _saved(_rank: int, case: Case, form: str) -> dict[str, torch.Tensor]:
    """The tensors that this rank saves."""
    engine = make_engine(case)
    common = {"iteration": 1, "args": Namespace(), "optimizer": {"optimizer": {"param_groups": []}}}
    snapshot: Snapshot = SNAPSHOTS[form](engine, common, with_optimizer=form == "torch_dist", impl="local")  # fmt: skip
    found: dict[str, Any] = {
        f"{shard.key} {shard.offset}": shard.tensor.clone() for shard in snapshot.shards
    }
    for tensor in () if snapshot.rank_file is None else snapshot.rank_file.tensors:
        own = [part.values for part in tensor.parts if part.values is not None]
        found |= {f"{tensor.placeholder.key} {n}": values.clone() for n, values in enumerate(own)}
    return found


@pytest.mark.parametrize("form", SNAPSHOTS)
def test_each_rank_saves_the_same_tensors_whatever_is_sharded(form: str) -> None:
    case = Case("llama", dp=2, distributed=True, options=(("dtype", "bfloat16"),))
    every = run_ranks(2, _saved, case, form)
    for zero in (2, 3):
        for found, expected in zip(
            run_ranks(2, _saved, replace(case, zero=zero), form), every, strict=True
        ):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert any(every)


def _shard_sizes(_rank: int, case: Case) -> list[int]:
    (chunk,) = make_engine(case).buckets
    return [len(bucket.gradients) for bucket in chunk.buckets if isinstance(bucket, GradientShards)]


def test_gradients_of_whole_matrices_are_kept_by_their_owners_alone() -> None:
    """Muon needs this, because its update uses whole matrices."""
    case = Case("qwen3", dp=2, distributed=True, zero=2, kind="muon")
    first, second = run_ranks(2, _shard_sizes, case)
    whole = [len(bucket.data) for bucket in make_engine(replace(case.alone())).buckets[0].buckets]
    assert 0.9 * sum(whole) < sum(first) + sum(second) < 1.1 * sum(whole)


@pytest.mark.parametrize(
    "model",
    [
        "llama-all-linear",
        "mixtral-experts",
        "llama-whole",
        "llama-tied-whole",
        "llama-rows",
        "llama-tied-rows",
        "llama-dora",
    ],
)
def test_frozen_parameters_are_sharded_beside_adapters(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Adapted(model, dp=2, distributed=True)
    (expected, adapters) = run_ranks(2, train_adapters, case, 3)[0]
    made: list[OnDemand] = []
    release = OnDemand.release

    def counting(self: OnDemand) -> None:
        made.append(self)
        release(self)

    monkeypatch.setattr(OnDemand, "release", counting)
    monkeypatch.setattr("tests.trainer.parallel.test_lora.OptimizerOptions", _with_sharding)
    losses, found = run_ranks(2, train_adapters, case, 3)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert found.keys() == adapters.keys()
    for key, tensor in adapters.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-5)
    assert any(each.shard.dtype == each.whole.dtype for each in made), "frozen ones"


def _with_sharding(**options: Any) -> Any:
    from megatron_lite.settings.options import OptimizerOptions

    return OptimizerOptions(**options, shards_gradients=True, shards_parameters=True)


def _logits(_rank: int, case: Case) -> torch.Tensor:
    """Train a step and return logits. Sharded parameters must not be used where they are not in memory."""
    engine = make_engine(case)
    step(engine, case, 0)
    batch = next(batches(case, 1))
    if engine.shards_parameters:
        with pytest.raises(ParametersFreed, match=r"inside Engine\.whole_parameters"):
            engine.last_stage(batch)
    with engine.whole_parameters():
        last = engine.last_stage(batch)
        assert last is not None
        chunk, hidden = last
        inside = chunk.logits((hidden,))
    if engine.shards_parameters:
        with pytest.raises(ParametersFreed):
            chunk.logits((hidden,))
    found = engine.logits(batch)
    assert found is not None
    assert torch.equal(found, inside)
    engine.finish()
    return found.detach()


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_logits_of_sharded_parameters_need_a_region_that_keeps_them(model: str) -> None:
    case = Case(model, dp=2, distributed=True, zero=3)
    for found, expected in zip(
        run_ranks(2, _logits, case), run_ranks(2, _logits, replace(case, zero=1)), strict=True
    ):
        # Sums of gradients have another order, and a step of Adam makes much of small ones.
        largest = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)
