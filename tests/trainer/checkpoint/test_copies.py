"""The memory of an asynchronous save beside the model: copies, in buffers that are used again."""

import torch

from formats.pickle_writer import Placeholder
from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.placement import Shard
from megatron_lite.checkpoint.rank_file import Part, RankFile, SharedTensor
from megatron_lite.checkpoint.snapshot import Snapshot


def test_a_copy_is_of_its_moment_and_the_next_save_uses_its_memory_again() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4)]
    parts = Part(0, 0, 4, tensors[1]), Part(1, 4, 6, None)
    file = RankFile(None, None, (SharedTensor(Placeholder("b", (6,), "int64"), parts, (0,)),))
    snapshot = Snapshot(1, {}, (Shard("a", (0, 0), (2, 3), tensors[0]),), rank_file=file)
    copies = Copies()
    first = snapshot.copied(copies)
    copies.wait()
    for tensor in tensors:
        tensor.mul_(10)
    assert (first.shards[0].tensor.sum(), of_file(first).sum()) == (15, 6)
    places = first.shards[0].tensor.data_ptr(), of_file(first).data_ptr()
    second = snapshot.copied(copies)
    copies.wait()
    assert (second.shards[0].tensor.data_ptr(), of_file(second).data_ptr()) == places
    assert (second.shards[0].tensor.sum(), of_file(second).sum()) == (150, 60)


def of_file(snapshot: Snapshot) -> torch.Tensor:
    """The part of this rank in the file's only tensor."""
    assert snapshot.rank_file is not None
    ours, others = snapshot.rank_file.tensors[0].parts
    assert ours.values is not None
    assert others.values is None
    return ours.values
