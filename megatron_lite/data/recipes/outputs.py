"""Writes a corpus to a directory: the files of the input, in their order and with their compression.

    corpus/a.jsonl.gz  corpus/b.parquet     ->     train/a.jsonl.gz  train/b.jsonl

The directory appears by one rename when all of its files are complete.
"""

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, cast

from megaconv.errors import TargetExists, UsageError
from megatron_lite.data.packages import package

_GZIP, _ZSTANDARD = ".gz", ".zst"
_RECORDS = (".jsonl", ".json")


def output_names(files: Sequence[str]) -> list[str]:
    """Return the name of each file in an output directory. Raises UsageError if two files get the same name.

    The names are paths below the files' common directory. Tables and plain text become JSON lines.
    """
    paths = [Path(file).absolute() for file in files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    names = [_as_json_lines(path.relative_to(root)) for path in paths]
    for number, name in enumerate(names):
        if name in names[:number]:
            other = files[names.index(name)]
            raise UsageError(
                f"--input: {other} and {files[number]} would both be written to {name}"
            )
    return names


def _as_json_lines(path: Path) -> str:
    compression = path.suffix if path.suffix in (_GZIP, _ZSTANDARD) else ""
    plain = path.with_suffix("") if compression else path
    named = plain if plain.suffix in _RECORDS else plain.with_name(f"{plain.name}.jsonl")
    if plain.suffix == ".parquet":
        named = plain.with_suffix(".jsonl")
    return f"{named}{compression}"


@contextmanager
def staged_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden directory beside the target, which takes the target's place at the end.

    After an error nothing is left. Raises TargetExists.
    """
    if target.exists():
        if not overwrite:
            raise TargetExists(f"{target}: exists; choose another directory, or pass --overwrite")
        if not target.is_dir():
            raise TargetExists(f"{target}: is no directory, so --overwrite doesn't replace it")
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
    try:
        staging.chmod(0o755)
        yield staging
        _take_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _take_place(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(old)  # an empty directory gives way to another one
    staging.rename(target)
    shutil.rmtree(old)


@contextmanager
def opened_for_writing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, compressed as its suffix says, and bring its content to disk at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        with _compressed(file, path) as content:
            yield content
        file.flush()
        os.fsync(file.fileno())


def _compressed(file: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    if path.suffix == _GZIP:
        # No name and no time: the same documents give the same bytes.
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
        return cast(AbstractContextManager[IO[bytes]], packed)
    if path.suffix == _ZSTANDARD:
        zstandard = package("zstandard", f"{path.name}: writing it")
        writer = zstandard.ZstdCompressor().stream_writer(file, closefd=False)
        return cast(AbstractContextManager[IO[bytes]], writer)
    return nullcontext(file)
