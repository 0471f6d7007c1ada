"""Gradients and parameters that data-parallel ranks shard: the memory that exists for a time, and the number of collectives.

optimizer/shards.py has the buckets, optimizer/fetching.py the times at which parameters are fetched and freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from formats.tensor import ITEMSIZE
from megaconv.model.layout import Chunk
from megatron_lite.optimizer.algorithms import make_dealer
from megatron_lite.optimizer.fetching import Fetching
from megatron_lite.optimizer.filling import Filling, fill, unit_of
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.planning.stages import Described

EMBEDDING, HEAD = "embedding", "output_layer"
FURTHER = "mtp."
"""The beginning of the names of layers that predict further tokens."""


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
    fetched = _fetched(run, run.in_order(index, chunk), chunk, fillings)
    for filling, times in zip(fillings, fetched, strict=True):
        is_trained = filling.first.trained
        yield Times(filling, reduced if is_trained else 0, times * run.run.microbatches)


@dataclass
class _Bucket:
    """The parameters of a bucket, whose fetches are counted."""

    present: bool = False
    fetched: int = 0

    def start(self) -> None:
        self.fetched += not self.present
        self.present = True

    def ready(self) -> None:
        self.start()

    def release(self) -> None:
        self.present = False


def _fetched(
    run: Described, infos: Sequence[ParameterInfo], chunk: Chunk, fillings: Sequence[Filling]
) -> list[int]:
    """Return how often the two passes of a microbatch gather each bucket."""
    buckets = [_Bucket() for _ in fillings]
    bucket_of = {
        member.info.name: bucket
        for filling, bucket in zip(fillings, buckets, strict=True)
        for member in filling.members
    }

    def of(found: Iterable[ParameterInfo]) -> list[_Bucket]:
        return [bucket_of[info.name] for info in found if info.name in bucket_of]

    units = _units(infos, chunk)
    fetching = Fetching(
        [of(unit.infos) for unit in units],
        of(_held(run, infos, chunk)),
        # The backward pass of the embedding needs only the tokens.
        needs_parameters=[unit.name != EMBEDDING for unit in units],
        ahead=run.optimizer.overlap_param_gather,
    )
    names = [unit.name for unit in units]
    calls = _calls(run, names, chunk)
    fetching.begin(backward=False)
    for number in calls:
        fetching.before_forward(number)
        fetching.after_forward(number)
    fetching.end(backward_follows=run.sizes.layout.pp == 1)
    fetching.begin(backward=True)
    for number in reversed(calls):
        fetching.before_backward(number)
    fetching.end(backward_follows=False)
    return [bucket.fetched for bucket in buckets]


class _Unit(NamedTuple):
    """A layer, or a module outside the layers."""

    name: str
    infos: list[ParameterInfo]


def _units(infos: Sequence[ParameterInfo], chunk: Chunk) -> list[_Unit]:
    """Return the units in the order of a forward pass: the layers of further tokens come after the head."""
    found = [_Unit(name, list(unit)) for name, unit in groupby(infos, key=_module)]
    further = [unit for unit in found if unit.name.startswith(FURTHER)]
    own = [unit for unit in found if unit not in further]
    if chunk.is_last and all(unit.name != HEAD for unit in own):
        own.append(_Unit(HEAD, []))  # a tied head has no parameters
    return own + further


def _calls(run: Described, names: Sequence[str], chunk: Chunk) -> list[int]:
    """Return the numbers of the units that a forward pass calls, in order.

    Each further token needs the embedding before its layer, and the head after it.
    """
    further = [number for number, name in enumerate(names) if name.startswith(FURTHER)]
    first = 0 if chunk.embeds or EMBEDDING not in names else 1
    calls = list(range(first, len(names) - len(further)))
    if run.run.head_again and chunk.is_last:
        calls.append(names.index(HEAD))
    for number in further[: run.run.mtp_layers]:
        calls += [names.index(EMBEDDING), number, names.index(HEAD)]
    return calls


def _fillings(run: Described, trained: Sequence[ParameterInfo]) -> list[Filling]:
    """Return the buckets of a chunk with these parameters, which have gradients."""
    return fill(trained, run.optimizer.bucket_elements, make_dealer(run.optimizer).deals)


def _frozen_fillings(run: Described, index: int, chunk: Chunk) -> list[Filling]:
    """Return the buckets of the parameters that are sharded beside adapters."""
    frozen = [info for info in run.parameters(index, chunk) if info.frozen]
    return fill(frozen, run.optimizer.bucket_elements, lambda _: False)


def _module(info: ParameterInfo) -> str:
    """Return the unit's module: a layer, or a module outside the layers. The head of a T5 is inside another module."""
    unit = unit_of(info)
    if HEAD in unit:
        return HEAD
    return unit if ".layers." in unit else unit.partition(".")[0]


def passing_bytes(run: Described, pp_rank: int) -> int:
    """Return the bytes of gradients and parameters that exist for a time during a step, on a rank of this stage.

    Gradients: two buckets in the dtype of their sums. Parameters: those of a unit and of the next one, and of a tied embedding.
    """
    optimizer = run.optimizer
    if run.run.replicas == 1 or not optimizer.shards_gradients:
        return 0
    most = 0
    for index, chunk in enumerate(run.run.chunks(pp_rank)):
        infos = run.parameters(index, chunk)
        trained = _largest_pair(_fillings(run, run.trained(index, chunk)))
        found = ITEMSIZE[optimizer.main_grads_dtype] * trained
        if optimizer.shards_parameters:
            frozen = _largest_pair(_frozen_fillings(run, index, chunk))
            held = sum(prod(info.native.shape) for info in _held(run, infos, chunk))
            found += run.run.itemsize * (trained + frozen + held)
        most = max(most, found)
    return most


def _largest_pair(fillings: Sequence[Filling]) -> int:
    """Return the elements of the largest two consecutive buckets."""
    sizes = [filling.elements for filling in fillings]
    return max((sum(sizes[first : first + 2]) for first in range(len(sizes))), default=0)


def _held(run: Described, infos: Sequence[ParameterInfo], chunk: Chunk) -> list[ParameterInfo]:
    """Return the parameters of an embedding that stays in memory during a whole pass, because the head uses it too."""
    if not (run.config.tie_embeddings and chunk.is_last):
        return []
    return [info for info in infos if _module(info) == EMBEDDING]
