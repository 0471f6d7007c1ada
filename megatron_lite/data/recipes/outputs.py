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

GZIP, ZSTANDARD = ".gz", ".zst"
_RECORDS = (".jsonl", ".json")
_OF_TOKENIZERS = ("merges.txt", "vocab.txt", "tokenizer.model")


def output_names(files: Sequence[str]) -> list[str]:
    """Return the name of each file in an output directory. Raises UsageError if two files get the same name.

    The names are paths below the files' common directory. Tables and plain text become JSON lines.
    """
    paths = [Path(file).absolute() for file in files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    names = [_as_json_lines(path.relative_to(root)) for path in paths]
    seen: dict[str, str] = {}
    for file, name in zip(files, names, strict=True):
        if name in seen:
            raise UsageError(f"--input: {seen[name]} and {file} would both be written to {name}")
        seen[name] = file
    return names


def _as_json_lines(path: Path) -> str:
    compression = path.suffix if path.suffix in (GZIP, ZSTANDARD) else ""
    plain = path.with_suffix("") if compression else path
    named = plain if plain.suffix in _RECORDS else plain.with_name(f"{plain.name}.jsonl")
    if plain.suffix == ".parquet":
        named = plain.with_suffix(".jsonl")
    return f"{named}{compression}"


@contextmanager
def staged_directory(target: Path, inputs: Sequence[str], *, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden directory beside the target, which takes the target's place at the end.

    After an error nothing is left. Raises TargetExists, and UsageError as require_free does.
    """
    require_free(target, inputs, overwrite=overwrite)
    target = target.resolve()  # the directory is made where a link leads to
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        staging.chmod(0o755)
        yield staging
        take_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_free(target: Path, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Raise TargetExists if the target can't become an output, and UsageError if it holds one of the inputs."""
    require_no_input(target, inputs)
    if not target.exists():
        return
    if not overwrite:
        raise TargetExists(f"{target}: exists; choose another directory, or pass --overwrite")
    if not target.is_dir():
        raise TargetExists(f"{target}: is no directory, so --overwrite doesn't replace it")
    other = next((path for path in target.rglob("*") if not _may_be_an_output(path)), None)
    if other is not None:
        raise TargetExists(
            f"{other}: is no file that `data` writes, so --overwrite doesn't replace {target}; "
            "choose another directory, or remove the file yourself"
        )


def require_no_input(target: Path, inputs: Sequence[str]) -> None:
    """Raise UsageError if one of the inputs lies in a directory that an output replaces."""
    for file in inputs:
        if is_in(Path(file), target):
            raise UsageError(
                f"--input {file}: lies in the output {target}; choose another directory"
            )


def is_in(path: Path, directory: Path) -> bool:
    """Return whether a file lies in a directory, or is that place itself."""
    return path.resolve().is_relative_to(directory.resolve())


def _may_be_an_output(path: Path) -> bool:
    """Return whether the commands of `data` write such files: JSON lines, also compressed, and files of tokenizers."""
    if path.is_symlink():
        return False
    plain = path.with_suffix("") if path.suffix in (GZIP, ZSTANDARD) else path
    return path.is_dir() or plain.suffix in _RECORDS or path.name in _OF_TOKENIZERS


def take_place(staging: Path, target: Path) -> None:
    """Rename a directory to the target, and remove the target's old content. A link stays, and leads to the new content."""
    target = target.resolve()
    if not target.exists():
        staging.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(old)  # an empty directory gives way to another one
    staging.rename(target)
    shutil.rmtree(old)


def partial_of(target: Path) -> Path:
    """Return the hidden file that becomes an output. It ends as the output's name, which gives its compression."""
    return target.with_name(f".partial.{target.name}")


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
    if path.suffix == GZIP:
        # No name and no time: the same documents give the same bytes.
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
        return cast(AbstractContextManager[IO[bytes]], packed)
    if path.suffix == ZSTANDARD:
        zstandard = package("zstandard", f"{path.name}: writing it")
        writer = zstandard.ZstdCompressor().stream_writer(file, closefd=False)
        return cast(AbstractContextManager[IO[bytes]], writer)
    return nullcontext(file)
