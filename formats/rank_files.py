"""Megatron's `torch` checkpoint: one torch-saved file per model-parallel rank.

    <root>/latest_checkpointed_iteration.txt        `5`, or `release`
    <root>/best_checkpointed_iteration.txt          `5`: that with the lowest validation loss; megatron_lite writes it
    <root>/iter_0000005/mp_rank_01_002/model_optim_rng.pt        (tensor rank 1, pipeline rank 2)
    <root>/iter_0000005/mp_rank_01_002_000/...                   (with an expert rank, if expert parallelism is used)

If a name has two numbers, the second is a pipeline rank or an expert rank. Only the contents show which. Source:
megatron/training checkpointing.py of Megatron-LM.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from formats.ceilings import TRACKER_BYTES
from formats.errors import CorruptCheckpoint
from formats.opened import not_recorded
from formats.regular_files import read_small

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
RELEASE = "release"
_OLD_MODEL_FILE = "model_rng.pt"

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True)
class RankFiles:
    """The files of one iteration."""

    directory: Path
    iteration: int | None
    """Number of the iteration; None for `release`."""
    files: dict[tuple[int, ...], Path]
    """(tensor rank[, second number[, third]]) -> model file."""


def iteration_directory(iteration: int | None) -> str:
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def is_version(name: str) -> bool:
    """True if a directory has the name of an iteration."""
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def run_of(place: Path) -> Path:
    """The directory of the run of an iteration's directory; any other directory itself."""
    return place.parent if is_version(place.name) else place


def is_number(word: str) -> bool:
    """True if a tracker's word can be the number of an iteration."""
    return word.isdecimal() and len(word) <= 18


def directory_with(name: str, place: Path) -> Path:
    """The directory that a file about a checkpoint belongs to: that of the run if the one of an iteration has none.

    name: the file's name. place: the checkpoint's directory, or a file in it. The file needs not exist.
    """
    path = place.parent if place.is_file() else place
    is_of_the_run = (
        is_version(path.name) and not (path / name).exists() and (path.parent / name).exists()
    )
    return path.parent if is_of_the_run else path


def iterations(root: Path) -> list[str]:
    """Names of the iteration directories of a run, sorted by number, with `release` last."""
    if not root.is_dir():
        return []
    found = [entry.name for entry in root.iterdir() if is_version(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda name: (name == RELEASE, len(name), name))


def rank_directory(tp_rank: int, pp_rank: int, ep_rank: int, pp: int, ep: int) -> str:
    return (
        f"mp_rank_{tp_rank:02d}"
        + (f"_{pp_rank:03d}" if pp > 1 else "")
        + (f"_{ep_rank:03d}" if ep > 1 else "")
    )


def find_version(path: Path) -> Path | None:
    """The directory with the rank directories: that of the tracker's iteration, or path itself, or the only one that
    exists.

    None if path is not a Megatron checkpoint. Raises CorruptCheckpoint if the tracker names a missing directory.
    """
    if not path.is_dir():
        return None
    tracker = path / TRACKER
    if tracker.is_file():
        with not_recorded():
            # A running job may change the tracker meanwhile. The iteration that is read stays the same.
            word = read_small(tracker, TRACKER_BYTES).decode("utf-8", "replace").strip()
        if word != RELEASE and not is_number(word):
            # The message doesn't repeat the content: the tracker may be a link to a private file.
            raise CorruptCheckpoint(
                f"{tracker}: should hold an iteration number or `release`, found {len(word)} characters of something else"
            )
        version = path / (RELEASE if word == RELEASE else iteration_directory(int(word)))
        if not version.is_dir():
            raise CorruptCheckpoint(
                f"{tracker}: says {word}, but there is no directory {version}", code="missing-file"
            )
        return version
    if _rank_directories(path):
        return path
    versions = [entry for entry in path.iterdir() if entry.is_dir() and is_version(entry.name)]
    return versions[0] if len(versions) == 1 else None


def _rank_directories(version: Path) -> list[tuple[tuple[int, ...], Path]]:
    found = []
    for entry in version.iterdir():
        match = _RANK.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append(
                (tuple(int(number) for number in match.groups() if number is not None), entry)
            )
    return sorted(found)


def is_rank_files(version: Path) -> bool:
    """True if this iteration is in `torch` format. Other iterations under the same root may differ."""
    return bool(_rank_directories(version)) and not (version / "metadata.json").exists()


def read(version: Path) -> RankFiles:
    """The rank files of one iteration. Raises CorruptCheckpoint if one is missing."""
    files: dict[tuple[int, ...], Path] = {}
    for numbers, directory in _rank_directories(version):
        file = directory / MODEL_FILE
        if file.with_name(_OLD_MODEL_FILE).is_file():
            raise CorruptCheckpoint(
                f"{file.with_name(_OLD_MODEL_FILE)}: a checkpoint of Megatron up to 23.04 with a distributed optimizer, which is "
                "saved separately for every data-parallel rank; it can't be read. Load and save it with core 0.4 or newer"
            )
        if not file.is_file():
            raise CorruptCheckpoint(
                f"{file}: no such file; every rank directory holds one", code="missing-file"
            )
        if numbers in files:
            raise CorruptCheckpoint(
                f"{directory}: is a second directory of the rank of {files[numbers].parent.name}; remove one"
            )
        files[numbers] = file
    if len({len(numbers) for numbers in files}) != 1:
        names = ", ".join(file.parent.name for file in files.values())
        raise CorruptCheckpoint(
            f"{version}: rank directories of different kinds in one place: {names}"
        )
    match = re.fullmatch(r"iter_(\d+)", version.name)
    return RankFiles(version, int(match[1]) if match else None, files)
