"""What a save holds in memory beside the model: whole tensors one by one, copies in buffers that are used again."""

import weakref
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.placement import Shard
from megatron_lite.checkpoint.snapshot import Snapshot, _whole_slots
from megatron_lite.parallel import comm
from tests.trainer.parallel.conftest import world  # noqa: F401  # a fixture
from tests.trainer.parallel.small import Case, make_engine, step
from tests.trainer.parallel.worlds import World


def _most_whole_tensors(rank: int, case: Case) -> tuple[int, dict[Any, dict[str, torch.Tensor]]]:
    """(how many were there at one time, the optimizer's state as the rank has it)."""
    engine = make_engine(case)
    step(engine, case, 0)
    engine.finish()
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    most, all_reduce = 0, comm.all_reduce

    def watching(tensor: torch.Tensor, group: Any, **how: Any) -> Any:
        nonlocal most
        seen.append(weakref.ref(tensor.untyped_storage()))
        most = max(most, sum(storage() is not None for storage in seen))
        return all_reduce(tensor, group, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_reduce", watching)
        found = _whole_slots(engine, keep=rank == 0)
    engine.grid.close()
    return most, {key: {slot: tensor.clone() for slot, tensor in slots.items()} for key, slots in found.items()}


def test_ranks_that_write_nothing_hold_one_whole_tensor_of_a_shared_optimizer_at_a_time(
    world: World,  # noqa: F811
) -> None:
    _, expected = _most_whole_tensors(0, Case("qwen3"))
    (_, kept), (most, other) = world.run(2, _most_whole_tensors, Case("qwen3", dp=2, distributed=True))
    assert most <= 2  # gloo may not have let go of the one before
    assert not any(other.values())
    for key, slots in expected.items():
        for slot, tensor in slots.items():
            torch.testing.assert_close(kept[key][slot], tensor, rtol=1e-2, atol=2e-5)


def test_a_copy_is_of_its_moment_and_the_next_save_uses_its_memory_again() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4)]
    snapshot = Snapshot(
        1, {}, (Shard("a", (0, 0), (2, 3), tensors[0]),), rank_file=("file", {"model": {"b": [tensors[1]]}, "step": 3})
    )
    copies = Copies()
    first = snapshot.copied(copies)
    copies.wait()
    for tensor in tensors:
        tensor.mul_(10)
    assert first.rank_file is not None
    (of_file,) = first.rank_file[1]["model"]["b"]
    assert (first.shards[0].tensor.sum(), of_file.sum(), first.rank_file[1]["step"]) == (15, 6, 3)
    places = first.shards[0].tensor.data_ptr(), of_file.data_ptr()
    second = snapshot.copied(copies)
    copies.wait()
    assert second.rank_file is not None
    (of_file,) = second.rank_file[1]["model"]["b"]
    assert (second.shards[0].tensor.data_ptr(), of_file.data_ptr()) == places
    assert (second.shards[0].tensor.sum(), of_file.sum()) == (150, 60)
