"""The order of communication: buckets in the order of the model, started in one order, waited for at their first
use."""

from functools import partial
from typing import Any

import pytest
import torch

from megatron_lite.engine import Engine
from megatron_lite.optimizer.buckets import Bucket
from megatron_lite.parallel import comm
from tests.trainer.parallel.small import Case, batches, make_engine, step
from tests.trainer.parallel.worlds import World


def layers_in(bucket: Bucket) -> set[str]:
    return {
        ".".join(member.info.name.split(".")[:3])
        for member in bucket.members
        if ".layers." in member.info.name
    }


def engine_of_layers() -> Engine:
    """A bucket for each layer, and for what stands outside of them."""
    return make_engine(Case("qwen3"), bucket_elements=1)


def test_buckets_follow_the_model_layer_by_layer() -> None:
    (chunk,) = engine_of_layers().buckets
    found = [
        sorted(layers_in(bucket)) or [bucket.members[0].info.name.split(".")[0]]
        for bucket in chunk.buckets
    ]
    layers = [[f"decoder.layers.{layer}"] for layer in range(4)]
    assert found == [["embedding"], *layers, ["decoder"], ["output_layer"]]


class Gathering:
    def __init__(self, bucket: Bucket, outstanding: list[Bucket]) -> None:
        self.bucket, self.outstanding = bucket, outstanding

    def wait(self) -> None:
        self.outstanding.remove(self.bucket)


def test_a_layer_waits_for_its_own_parameters_while_those_of_later_ones_are_on_their_way() -> None:
    engine = engine_of_layers()
    (chunk,) = engine.buckets
    outstanding: list[Bucket] = []
    for bucket in chunk.buckets:
        outstanding.append(bucket)
        bucket.gathering = Gathering(bucket, outstanding)  # type: ignore[assignment]
    seen: list[set[str]] = []

    def look(*_: object) -> None:
        seen.append(set().union(*(layers_in(bucket) for bucket in outstanding)))

    for layer in engine.chunks[0].decoder.layers:
        layer.register_forward_pre_hook(look)
    engine.evaluate(list(batches(Case("qwen3"), 0))[:1])
    assert [len(later) for later in seen] == [3, 2, 1, 0]
    assert not outstanding


@pytest.mark.parametrize("late", [None, 2, 5])
def test_reductions_start_from_the_last_bucket_on_whichever_gradient_is_late(
    late: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that lacks one holds up those before it, so that all ranks start the same collectives in the same order."""
    engine = engine_of_layers()
    (chunk,) = engine.buckets
    launched: list[int] = []
    whole = Bucket.launch

    def launch(self: Bucket) -> None:
        launched.append(chunk.buckets.index(self))
        whole(self)

    monkeypatch.setattr(Bucket, "launch", launch)
    begin = chunk.begin

    def begin_late() -> None:
        begin()
        if late is not None:
            chunk.buckets[late].missing += 1  # a gradient that never comes

    monkeypatch.setattr(chunk, "begin", begin_late)
    finish, before_end = chunk.finish, list[int]()
    monkeypatch.setattr(chunk, "finish", partial(remember, launched, before_end, finish))
    engine.train_step(list(batches(Case("qwen3"), 0)), lr=0.0)
    assert launched == list(reversed(range(len(chunk.buckets))))
    assert before_end == [number for number in launched if late is None or number > late]


def remember(launched: list[int], before_end: list[int], finish: object) -> None:
    before_end.extend(launched)
    assert callable(finish)
    finish()


def _bf16_on_the_way(_rank: int, distributed: bool) -> tuple[list[float], set[torch.dtype]]:
    sent: set[torch.dtype] = set()
    reduce_scatter, all_reduce = comm.reduce_scatter, comm.all_reduce

    def scattering(part: torch.Tensor, whole: torch.Tensor, *rest: Any, **how: Any) -> Any:
        sent.add(whole.dtype)
        return reduce_scatter(part, whole, *rest, **how)

    def reducing(tensor: torch.Tensor, group: Any, *, later: bool = False) -> Any:
        sent.update([tensor.dtype] if later else [])
        return all_reduce(tensor, group, later=later)

    case = Case("qwen3", dp=2, distributed=distributed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "reduce_scatter", scattering)
        patch.setattr(comm, "all_reduce", reducing)
        engine = make_engine(case, bf16_reduce=True)
        losses = [step(engine, case, number).loss for number in range(3)]
        engine.finish()
        engine.grid.close()
    return losses, sent


@pytest.mark.parametrize("distributed", [True, False])
def test_gradients_are_sent_in_bf16_where_that_was_asked_for(
    world: World, distributed: bool
) -> None:
    expected = [
        step(alone, Case("qwen3"), number).loss
        for alone in [make_engine(Case("qwen3"))]
        for number in range(3)
    ]
    for losses, sent in world.run(2, _bf16_on_the_way, distributed):
        assert sent == {torch.bfloat16}
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses != pytest.approx(expected, rel=1e-9)
