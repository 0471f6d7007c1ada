"""Checks that each *_optim_states.pt of a ZeRO checkpoint is the file that its own rank saved. The tensors in it have
no names.

    <folder in the archive>     the file's name at the time of saving: bf16_zero_pp_rank_0_mp_rank_00_optim_states
    param_slice_mappings        stages 1 and 2: {parameter: fragment_address(numel, start)} of a group, per rank
    fp32_flat_groups            stage 3: a part of every parameter, so no two ranks have the same

Some files lack the first two. DeepSpeed before its universal checkpoints lists no slices. If torch wrote to an already
opened file, the folder is `archive`. Source: deepspeed 0.19.8, mixed_precision_linkage.py and tensor_fragment.py.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.tensor import FileTensor, LazyTensor, Shape

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
_REMEDY = (
    "copy the checkpoint again; without all *_optim_states.pt the module's weights are converted"
)

Slices = Mapping[str, tuple[int, int]]
"""Parameter -> (first element in a rank's partition, number of elements)."""


def _ranks_in(name: str) -> tuple[int, int] | None:
    """(data-parallel rank, model-parallel rank) in the name of a file or a folder; None if it has none."""
    found = _RANK.search(name)
    return None if found is None else (int(found[1]), int(found[2]))


def require_own_name(file: Path, folder: str | None) -> None:
    """Raise CorruptCheckpoint if the file is another rank's. folder: name of the folder in its archive."""
    saved_as, named = _ranks_in(folder or ""), _ranks_in(file.name)
    if saved_as is not None and named is not None and saved_as != named:
        raise CorruptCheckpoint(
            f"{file}: was saved as {folder}, the file of another rank; copy the checkpoint again"
        )


def require_different(files: Sequence[Path], ranks: Sequence[Sequence[LazyTensor]]) -> None:
    """Raise CorruptCheckpoint if two ranks of stage 3 hold the same vectors, by their checksums. ranks: the vectors of
    each rank."""
    seen: dict[tuple[tuple[int, int], ...], Path] = {}
    for file, vectors in zip(files, ranks, strict=True):
        checks = [
            held.check.entry
            for held in vectors
            if isinstance(held, FileTensor) and held.check is not None
        ]
        known = tuple((entry.size, entry.crc) for entry in checks)
        if (
            known
            and len(known) == len(vectors)
            and (other := seen.setdefault(known, file)) is not file
        ):
            raise CorruptCheckpoint(
                f"{file}: holds the same fp32 parameters as {other.name}, which is another rank's; copy the checkpoint again"
            )


def require_own_slices(
    files: Sequence[Path],
    group: int,
    expected: Sequence[Slices],
    listed: Sequence[Sequence[Mapping[str, Any]] | None],
) -> None:
    """Raise CorruptCheckpoint if a file lists other slices than its rank has. It checks one group of stages 1 and 2;
    lists are by rank."""
    for file, own, mappings in zip(files, expected, listed, strict=True):
        if not mappings:
            continue
        found = dict(_read_slices(mappings[group]))
        if found == own:
            continue
        name = min(name for name in {*found, *own} if found.get(name) != own.get(name))
        raise CorruptCheckpoint(
            f"{file}: its param_slice_mappings has {_described(found.get(name))} of {name}, where its rank has "
            f"{_described(own.get(name))}; is it another rank's file? {_REMEDY}"
        )


def slices(
    starts: Mapping[str, int], shapes: Mapping[str, Shape], partitions: Sequence[int]
) -> list[dict[str, tuple[int, int]]]:
    """The slices that each rank holds of a group's parameters.

    starts: the first element of each parameter in the joined vector. partitions: the lengths of the ranks' partitions.
    """
    ends = list(accumulate(partitions))
    held: list[dict[str, tuple[int, int]]] = [{} for _ in partitions]
    for name, start in starts.items():
        stop = start + prod(shapes[name])
        for rank in range(bisect_right(ends, start), len(ends)):
            first = ends[rank] - partitions[rank]
            if first >= stop:
                break
            begin, end = max(start, first), min(stop, ends[rank])
            if begin < end:
                held[rank][name] = begin - first, end - begin
    return held


def _read_slices(mapping: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, address in mapping.items():
        start, numel = int(address.state["start"]), int(address.state["numel"])
        if numel:
            yield name, (start, numel)


def _described(held: tuple[int, int] | None) -> str:
    return f"elements {held[0]} to {held[0] + held[1]}" if held else "nothing"
