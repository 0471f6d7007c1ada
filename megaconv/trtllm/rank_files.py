"""The files of TensorRT-LLM's ranks: their names, and the rank that megaconv notes in their metadata.

    rank3.safetensors        "__metadata__": {"format": "pt", "rank": "3", "ranks": "4"}

TensorRT-LLM doesn't read the metadata. Files of other software have none, so exchanged files show only in their names
and shapes.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from formats import safetensors
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from formats.wording import counted, listing
from megaconv.families.parts.keys import CONFIG_NAME

_NAME = re.compile(r"rank(0|[1-9]\d{0,5})\.safetensors")


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank{rank}.safetensors"


def rank_metadata(rank: int, ranks: int) -> dict[str, str]:
    """Entries of `__metadata__`. ranks: number of all ranks."""
    return {"rank": str(rank), "ranks": str(ranks)}


def rank_numbers(directory: Path) -> set[int]:
    """The ranks that have a file in a directory."""
    names = (file.name for file in directory.glob("rank*.safetensors"))
    return {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}


def require_all(directory: Path, ranks: int) -> None:
    """Raise CorruptCheckpoint if a rank has no file, or if there are files of further ranks."""
    held, expected = rank_numbers(directory), set(range(ranks))
    missing = [rank_file(rank) for rank in sorted(expected - held)]
    if missing:
        raise CorruptCheckpoint(
            f"{directory}: {len(missing)} of {counted(ranks, 'rank file')} missing: {listing(missing)}; "
            "a model needs all of them",
            code="missing-file",
        )
    if held > expected:
        file = directory / rank_file(min(held - expected))
        raise CorruptCheckpoint(
            f"{file}: is of a rank that the model doesn't have: {CONFIG_NAME} says that it has {ranks}. "
            "Remove the files of other runs",
            code="misplaced-rank-file",
        )


def read_rank(directory: Path, rank: int, ranks: int) -> Mapping[str, LazyTensor]:
    """The tensors of a rank. Raises CorruptCheckpoint for a damaged file, or the file of another rank."""
    file = directory / rank_file(rank)
    noted, expected = safetensors.read_metadata(file), rank_metadata(rank, ranks)
    found = {key: noted.get(key, value) for key, value in expected.items()}
    if found != expected:
        raise CorruptCheckpoint(
            f"{file}: was written as rank {found['rank']:.20} of {found['ranks']:.20}, expected rank {rank} of {ranks}; "
            "rank files were exchanged or renamed",
            code="misplaced-rank-file",
        )
    return safetensors.read(file)
