"""Bytes that ranks exchange in a step, with those of gradients and updated parameters, by the optimizer's buckets."""

from collections.abc import Iterator
from math import prod

from formats.tensor import ITEMSIZE
from megaconv.model.layout import Chunk
from megaconv.planning.collectives import FLOAT32, Counted, Traffic, sizes, summed
from megaconv.planning.run import Run
from megaconv.planning.traffic import of_passes, of_step, of_taught_head
from megatron_lite.optimizer.filling import padded
from megatron_lite.planning.sharding import bucket_times
from megatron_lite.planning.stages import Described


def stage_traffic(described: Described, pp_rank: int) -> list[Traffic]:
    """Return the traffic of one rank of this stage, one entry for each group and kind."""
    return summed(described.run, _all(described, pp_rank))


def _all(described: Described, pp_rank: int) -> Iterator[Counted]:
    run = described.run
    chunks = run.chunks(pp_rank)
    for index, chunk in enumerate(chunks):
        yield from of_passes(run, chunk)
        yield from of_gradients(described, index, chunk)
    yield from of_step(run, chunks)
    if described.teacher is not None:
        yield from _of_teacher(described.teacher.run, pp_rank, described.work.taught_sums)


def _of_teacher(run: Run, pp_rank: int, sums: int) -> Iterator[Counted]:
    """Yield the traffic of a teacher's passes, and of its part in the student's loss. sums: see Work.taught_sums."""
    for chunk in run.chunks(pp_rank):
        yield from of_passes(run, chunk)
    if pp_rank == run.layout.pp - 1:
        for group, kind, count in of_taught_head(run, sums):
            yield group, kind, count * run.microbatches


def of_gradients(described: Described, index: int, chunk: Chunk) -> Iterator[Counted]:
    """Yield the traffic of the gradients of a chunk, and of its updated parameters. index: of the chunk on its rank."""
    run, optimizer = described.run, described.optimizer
    ranks = sizes(run)
    trained = described.trained(index, chunk)
    for filling, reduced, gathered in bucket_times(described, index, chunk):
        axis, used = filling.axis, filling.elements
        size = used if filling.whole else padded(used, ranks[axis])
        sent = ITEMSIZE[optimizer.sent_dtype(in_float32=filling.in_float32)]
        if optimizer.distributed:
            itemsize = FLOAT32 if filling.in_float32 else run.itemsize
            yield axis, "reduce_scatter", size * sent * reduced
            yield axis, "all_gather", size * itemsize * gathered
        else:
            yield axis, "all_reduce", size * sent
    for info in trained:
        own = prod(info.native.shape) / (ranks[info.reduced_over] if optimizer.distributed else 1)
        itemsize = ITEMSIZE[optimizer.gradient_dtype(in_float32=info.in_float32)]
        if info.partial:
            yield "tp", "all_reduce", own * itemsize
        if info.tied:
            yield info.tied, "all_reduce", own * itemsize
