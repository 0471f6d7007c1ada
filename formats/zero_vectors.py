"""Parameters in the flat vectors of a ZeRO checkpoint (formats/zero_partitions.py describes the files).

Stages 1 and 2: the ranks' partitions of an optimizer group are joined to one vector. The vector holds the group's
parameters one after another, each followed by its padding. The end is padded so that all ranks have the same length.
Stage 3: every parameter is sharded separately, with ceil(numel / ranks) elements per rank and padding in the last part.
A rank's parts follow each other in its vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.flattened import narrowed, vector
from formats.tensor import LazyTensor, Shape


def starts(group: Mapping[str, Shape], paddings: Any, index: int) -> tuple[dict[str, int], int]:
    """(first element of each parameter of a group in the joined vector, end of the last padding), under stages 1 and 2."""
    found, start = dict[str, int](), 0
    for number, (name, shape) in enumerate(group.items()):
        found[name] = start
        start += prod(shape) + (paddings[index][number] if paddings else 0)
    return found, start


def parameters_of_groups(
    path: Path,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Sequence[LazyTensor]],
    paddings: Any,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of stages 1 and 2. ranks: each rank's partition of each group."""
    for index, group in enumerate(shapes):
        whole = vector([rank[index] for rank in ranks])
        first_elements, end = starts(group, paddings, index)
        ends = [first_elements[name] + prod(shape) for name, shape in group.items()]
        last = max(ends, default=0)
        elements = whole.shape[0]
        align = 2 * len(ranks)
        if last > elements or -(-end // align) != -(-elements // align):
            in_parameters = sum(map(prod, group.values()))
            raise CorruptCheckpoint(
                f"{path}: group {index} of the optimizer has {elements:,} elements, its parameters "
                f"{in_parameters:,}; files of several runs, or incomplete ones?",
                code="truncated-file",
            )
        for name, shape in group.items():
            yield name, narrowed(whole, first_elements[name], shape)


def parameters_of_stage_3(
    path: Path,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Sequence[LazyTensor]],
    paddings: Any,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of stage 3. ranks: each rank's vectors."""
    vectors, start = [vector(rank) for rank in ranks], 0
    for name, shape in (item for group in shapes for item in group.items()):
        piece = -(-prod(shape) // len(ranks))
        parts = []
        for rank, held in enumerate(vectors):
            count = min(piece, prod(shape) - rank * piece)
            if count > 0:
                parts.append(narrowed(held, start, (count,)))
        yield name, narrowed(vector(parts), 0, shape)
        start += piece
    if any(start > held.shape[0] for held in vectors):
        raise CorruptCheckpoint(
            f"{path}: its ranks hold fewer elements than its parameters have", code="truncated-file"
        )
