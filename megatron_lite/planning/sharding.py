"""Gradients and parameters that data-parallel ranks shard: the memory that exists for a time, and the number of collectives.

optimizer/shards.py has the buckets, optimizer/schedule.py the times at which parameters are fetched and freed.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from megaconv.model.layout import Chunk
from megatron_lite.optimizer.algorithms import make_dealer
from megatron_lite.optimizer.filling import Filling, fill, unit_of
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.planning.stages import Described

FLOAT32 = 4


class Times(NamedTuple):
    """The numbers of collectives of a bucket in a step."""

    filling: Filling
    reduced: int
    """The number of reductions of its gradients."""
    gathered: int
    """The number of times that its parameters are gathered."""


def bucket_times(run: Described, index: int, chunk: Chunk) -> Iterator[Times]:
    """Yield the buckets of a chunk, with the number of their collectives in a step. index: of the chunk on its rank."""
    optimizer = run.optimizer
    trained = _fillings(run, run.trained(index, chunk))
    reduced = run.run.microbatches if optimizer.shards_gradients else 1
    if not optimizer.shards_parameters:
        yield from (Times(filling, reduced, 1) for filling in trained)
        return
    fillings = [*trained, *_frozen_fillings(run, index, chunk)]
    infos = run.in_order(index, chunk)
    kept = _kept_for_backward(run, infos, chunk)
    bucket_of = {member.info.name: each for each in fillings for member in each.members}
    units = [list(unit) for _, unit in groupby(_of_buckets(infos, bucket_of), key=unit_of)]
    for filling in fillings:
        uses = [any(bucket_of[info.name] is filling for info in unit) for unit in units]
        passes = _runs(uses)
        if not any(info.name in kept for info in _members(filling)):
            backward = [
                use and _needs_parameters(unit) for use, unit in zip(uses, units, strict=True)
            ]
            passes += _runs(backward)
        is_trained = filling.first.trained
        yield Times(filling, reduced if is_trained else 0, passes * run.run.microbatches)


def _of_buckets(
    infos: Sequence[ParameterInfo], bucket_of: dict[str, Filling]
) -> list[ParameterInfo]:
    return [info for info in infos if info.name in bucket_of]


def _fillings(run: Described, trained: Sequence[ParameterInfo]) -> list[Filling]:
    """Return the buckets of a chunk with these parameters, which have gradients."""
    return fill(trained, run.optimizer.bucket_elements, make_dealer(run.optimizer).deals)


def _frozen_fillings(run: Described, index: int, chunk: Chunk) -> list[Filling]:
    """Return the buckets of the parameters that are sharded beside adapters."""
    frozen = [info for info in run.parameters(index, chunk) if info.frozen]
    return fill(frozen, run.optimizer.bucket_elements, lambda _: False)


def _members(filling: Filling) -> list[ParameterInfo]:
    return [member.info for member in filling.members]


def _runs(uses: Sequence[bool]) -> int:
    """Return the number of runs of units that use a bucket. It is freed after each run."""
    return sum(1 for used, _ in groupby(uses) if used)


def _needs_parameters(unit: Sequence[ParameterInfo]) -> bool:
    """Return whether the backward pass of a unit needs its parameters. The embedding's needs only the tokens."""
    return not unit[0].name.startswith("embedding.")


def _kept_for_backward(run: Described, infos: Sequence[ParameterInfo], chunk: Chunk) -> set[str]:
    """Return the parameters that stay between a forward pass and its backward pass: with one stage, the last unit's."""
    if run.sizes.layout.pp > 1:
        return set()
    if run.config.tie_embeddings and chunk.is_first and chunk.is_last:
        shared = {info.name for info in infos if info.name.startswith("embedding.")}
        return shared | {info.name for info in infos if info.name.startswith("output_layer.")}
    last = _module(infos[-1])
    return {info.name for info in infos if _module(info) == last}


def _module(info: ParameterInfo) -> str:
    """Return the unit's module: a layer, or a module outside the layers."""
    unit = unit_of(info)
    return unit if ".layers." in unit else unit.partition(".")[0]


def passing_bytes(run: Described, pp_rank: int) -> int:
    """Return the bytes of gradients and parameters that exist for a time during a step, on a rank of this stage.

    Gradients: two buckets in float32. Parameters: those of a unit and of the next one, and of a tied embedding.
    """
    optimizer = run.optimizer
    if run.run.replicas == 1 or not optimizer.shards_gradients:
        return 0
    most = 0
    for index, chunk in enumerate(run.run.chunks(pp_rank)):
        infos = run.parameters(index, chunk)
        trained = _largest_pair(_fillings(run, run.trained(index, chunk)))
        found = FLOAT32 * trained
        if optimizer.shards_parameters:
            frozen = _largest_pair(_frozen_fillings(run, index, chunk))
            found += run.run.itemsize * (trained + frozen + _held(run, infos, chunk))
        most = max(most, found)
    return most


def _largest_pair(fillings: Sequence[Filling]) -> int:
    """Return the elements of the largest two consecutive buckets."""
    sizes = [filling.elements for filling in fillings]
    return max((sum(sizes[first : first + 2]) for first in range(len(sizes))), default=0)


def _held(run: Described, infos: Sequence[ParameterInfo], chunk: Chunk) -> int:
    """Return the elements of an embedding that stays in memory during a whole pass, because the head uses it too."""
    if not (run.config.tie_embeddings and chunk.is_first and chunk.is_last):
        return 0
    of_embedding = (info for info in infos if info.name.startswith("embedding."))
    return sum(_elements(info) for info in of_embedding)


def _elements(info: ParameterInfo) -> int:
    found = 1
    for length in info.native.shape:
        found *= length
    return found
