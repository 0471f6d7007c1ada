"""Things beside a checkpoint in its directory, which `--overwrite` would remove too.

An output takes the place of a whole directory. These things in it are not a part of the checkpoint that it replaces:

    .git                        a repository, such as a clone from the Hub
    iter_0000100, iter_0000200  further iterations of a run
    checkpoint-500/             checkpoints of their own
"""

from collections.abc import Iterator
from pathlib import Path

from formats import rank_files
from formats.wording import counted, listing
from megaconv.errors import TargetExists
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.weight_files import has_weights

_REPOSITORY = ".git"
_DEPTH = 2
"""Levels of directories that are looked at."""


def require_nothing_else(target: str | Path, place: Path, record: str) -> None:
    """Raise TargetExists if a directory holds more than one checkpoint, or a repository.

    target: the output as the user names it. place: its directory, or a stand-in for a store's. record: the file that every output
    of megaconv has.
    """
    if (place / _REPOSITORY).exists():
        raise TargetExists(
            f"{target}: is a git repository ({_REPOSITORY}), which --overwrite would remove with its history; write to another place, "
            "and copy the new files into the repository"
        )
    iterations = rank_files.iterations(place)
    if len(iterations) > 1:
        raise TargetExists(
            f"{target}: is a run with {counted(len(iterations), 'iteration')} ({listing(iterations)}), all of which --overwrite would "
            "remove; choose another place, or remove them yourself"
        )
    inside = sorted(str(path.relative_to(place)) for path in _checkpoints(place, record, _DEPTH))
    if inside:
        raise TargetExists(
            f"{target}: holds {counted(len(inside), 'checkpoint')} besides its own ({listing(inside)}), which --overwrite would remove; "
            "choose another place, or move them"
        )


def _checkpoints(directory: Path, record: str, depth: int) -> Iterator[Path]:
    """Yield the directories below that hold a checkpoint of their own."""
    if not depth:
        return
    for path in directory.iterdir():
        is_part = path.is_symlink() or rank_files.is_version(path.name)
        if is_part or not path.is_dir():
            continue
        if _is_checkpoint(path, record):
            yield path
        else:
            yield from _checkpoints(path, record, depth - 1)


def _is_checkpoint(path: Path, record: str) -> bool:
    marks = (record, rank_files.TRACKER)
    is_model = (path / CONFIG_NAME).is_file() and has_weights(path)
    return is_model or any((path / name).is_file() for name in marks)
