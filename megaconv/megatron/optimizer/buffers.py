"""Computes the place of each parameter in the flat buffers of Megatron's distributed optimizer.

A rank's parameters fill a buffer back to front, so that the gradients that are ready first come first. A buffer is
divided into buckets, each padded for the data-parallel group. Files hold the buckets with or without that padding. The
result (bucket, offset in the bucket) doesn't depend on it. All numbers count elements.

Source: param_and_grad_buffer.py and distrib_optimizer.py of Megatron core 0.4 to 0.19.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from formats.tensor import Shape

ALIGNMENTS = (64, 1)
"""The alignment of parameters: from core 0.8 on, and before."""


class BufferParameter(NamedTuple):
    """One parameter of a rank."""

    name: str
    shape: Shape
    shared: bool = False
    """True for a tied embedding with a copy on another stage: it has its own bucket."""


class Place(NamedTuple):
    bucket: int
    offset: int
    """Offset in the bucket."""


@dataclass(frozen=True)
class Buffer:
    """Every parameter's place, and the size of each bucket without the padding at its end."""

    places: dict[str, Place]
    unpadded: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Size of all buckets together, without their padding."""
        return sum(self.unpadded)

    def offset(self, name: str) -> int:
        """Offset in all buckets one after another, without their padding."""
        place = self.places[name]
        return sum(self.unpadded[: place.bucket]) + place.offset


def fill(
    parameters: Sequence[BufferParameter], alignment: int = 64, bucket_size: int | None = None
) -> Buffer:
    """The buffer of these parameters, given in the order of named_parameters().

    bucket_size: a bucket that has reached this size is closed; None: there is one bucket (and one for each shared
    embedding).
    """
    places: dict[str, Place] = {}
    unpadded: list[int] = []
    position = 0  # offset in the bucket
    for parameter in reversed(parameters):
        start = _round_up(position, alignment)
        if parameter.shared and start:
            unpadded.append(start)
            start = 0
        places[parameter.name] = Place(len(unpadded), start)
        position = start + prod(parameter.shape)
        if parameter.shared or (bucket_size is not None and position >= bucket_size):
            unpadded.append(position)
            position = 0
    return Buffer(places, (*unpadded, position) if position else tuple(unpadded))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def gaps(buffer: Buffer, parameters: Iterable[BufferParameter]) -> Iterator[tuple[int, int]]:
    """(start, length) of each range that belongs to no parameter, in all buckets one after another."""
    filled: list[tuple[int, int]] = []
    for parameter in parameters:
        start = buffer.offset(parameter.name)
        filled.append((start, start + prod(parameter.shape)))
    position = 0
    for start, end in sorted(filled):
        if start > position:
            yield position, start - position
        position = end
    if buffer.numel > position:
        yield position, buffer.numel - position


def matching(
    parameters: Sequence[BufferParameter], numel: int, bucket_sizes: Iterable[int | None]
) -> Buffer | None:
    """The buffer with the size of a stored one, of all releases and these bucket sizes; None if none has that size."""
    for bucket_size in bucket_sizes:
        for alignment in ALIGNMENTS:
            buffer = fill(parameters, alignment, bucket_size)
            if buffer.numel == numel:
                return buffer
    return None


def fitting(parameters: Sequence[BufferParameter], unpadded: Sequence[int]) -> Buffer | None:
    """The buffer whose buckets have these lengths; None if the parameters don't fill them."""
    return next(
        (found for alignment in ALIGNMENTS if (found := _fill_to(parameters, unpadded, alignment))),
        None,
    )


def _fill_to(
    parameters: Sequence[BufferParameter], unpadded: Sequence[int], alignment: int
) -> Buffer | None:
    places: dict[str, Place] = {}
    bucket = position = 0
    for parameter in reversed(parameters):
        start = _round_up(position, alignment)
        if bucket < len(unpadded) and start and start + prod(parameter.shape) > unpadded[bucket]:
            if not 0 <= unpadded[bucket] - position < alignment:
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(unpadded):
            return None
        places[parameter.name] = Place(bucket, start)
        position = start + prod(parameter.shape)
    complete = bucket == len(unpadded) - 1 and 0 <= unpadded[bucket] - position < alignment
    return Buffer(places, tuple(unpadded)) if complete else None


def bucket_sizes(args: Namespace, pp_rank: int, chunk: int, numel: int) -> Iterator[int | None]:
    """The bucket sizes that a run with these arguments may have had, the most likely first.

    numel: elements of all parameters of the rank.
    """
    if getattr(args, "overlap_grad_reduce", False) and pp_rank == chunk == 0:
        count = getattr(args, "ddp_num_buckets", None)
        data = getattr(args, "data_parallel_size", None) or 1
        yield getattr(args, "ddp_bucket_size", None) or (
            numel // count if count else max(40_000_000, 1_000_000 * data)
        )
    yield None
