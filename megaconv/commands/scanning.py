"""`megaconv scan PATH`: finds content of a checkpoint that would run code, and damaged files.

Every file is examined separately, even if megaconv can't read the whole as a checkpoint. Nothing is loaded: of tensors,
only the headers are read.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats import dcp_metadata, gguf_header, safetensors, tar_archive, torch_zip
from formats.ceilings import RECORD_BYTES
from formats.errors import CheckpointError, UnsafeContent
from formats.pickle_scan import UNSAFE, Pickle, scan_file
from formats.regular_files import read_json, regular_size
from formats.tensor import InputFile
from megaconv.engine.sidecars import leads_out
from megaconv.errors import UsageError
from megaconv.families.parts.code_keys import kernels_of_hub
from megaconv.hub import nothing_at, resolve

SAFE_STATUS, FAULTY_STATUS, UNSAFE_STATUS = 0, 3, 6
_TARS = (".nemo", ".tar")
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
"""The first bytes of files of gzip, bzip2, xz, zstd and 7-Zip."""


@dataclass(frozen=True)
class Finding:
    """A finding about one file."""

    file: str
    what: str


@dataclass(frozen=True)
class NamedGlobal:
    """A class or function that a pickle names."""

    file: str
    place: str
    name: str
    judgement: str
    """`ordinary`, `named` (unknown, and not called) or `unsafe` (unknown, and called)."""


@dataclass(repr=False)
class Scan:
    """The findings, in the order of the files."""

    path: str
    files: int = 0
    globals: list[NamedGlobal] = field(default_factory=list)
    code: list[Finding] = field(default_factory=list)
    """Files that would run code, or that name code to run; links that lead out of the checkpoint."""
    faults: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)

    def __repr__(self) -> str:
        unsafe = len(self.unsafe) + len(self.code)
        return (
            f"<Scan: {self.path}, {self.files} files, {unsafe} unsafe, {len(self.faults)} faults>"
        )

    @property
    def unsafe(self) -> list[NamedGlobal]:
        return [each for each in self.globals if each.judgement == UNSAFE]

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if self.unsafe or self.code:
            return UNSAFE_STATUS
        return FAULTY_STATUS if self.faults else SAFE_STATUS

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "safe": not self.unsafe and not self.code,
            "intact": not self.faults,
            "files": self.files,
            "globals": [vars(each) for each in self.globals],
            "code": [vars(each) for each in self.code],
            "faults": [vars(each) for each in self.faults],
            "remarks": [vars(each) for each in self.remarks],
        }


def scan(path: str | Path) -> Scan:
    """Examine every file of a checkpoint: a directory, a single file, or a Hub id.

    Raises CheckpointError if nothing is there.
    """
    place = resolve(path)
    if isinstance(place, str):
        raise UsageError(f"{place}: scan looks at files; expected a path or a Hub id")
    if not place.exists():
        raise nothing_at(place)
    found = Scan(str(path))
    for file in _files(place, found):
        found.files += 1
        shown = file.name if file == place else str(file.relative_to(place))
        _look_at(file, shown, found)
    return found


def _files(place: Path, found: Scan) -> Iterator[Path]:
    """All files and links at a place. A directory that can't be read is a fault."""
    if not place.is_dir():
        yield place
        return

    def note_unreadable(error: OSError) -> None:
        name = str(Path(error.filename).relative_to(place))
        found.faults.append(Finding(name, f"can't be read: {error.strerror}"))

    for folder, directories, names in os.walk(place, onerror=note_unreadable):
        directories.sort()
        for name in sorted(
            [*names, *(each for each in directories if (Path(folder) / each).is_symlink())]
        ):
            yield Path(folder) / name


def _look_at(file: Path, name: str, found: Scan) -> None:
    if file.is_symlink() and leads_out(file) is not None:
        found.code.append(
            Finding(name, f"is a link to {leads_out(file)}, outside of its directory")
        )
        return
    if file.is_dir():  # a link to a directory of the checkpoint, which is examined at its own place
        return
    if file.suffix == ".py":
        found.remarks.append(
            Finding(
                name,
                "is code; nothing runs it unless a configuration's auto_map, or a program, names it",
            )
        )
        return
    try:
        _look_into(file, name, found)
    except UnsafeContent as error:
        if not any(each.file == name for each in found.unsafe):
            found.code.append(Finding(name, _without_path(error, file)))
    except CheckpointError as error:
        found.faults.append(Finding(name, _without_path(error, file)))
    except OSError as error:
        found.faults.append(Finding(name, f"can't be read: {error.strerror}"))


def _without_path(error: CheckpointError, file: Path) -> str:
    return str(error).removeprefix(f"{file}: ")


def _look_into(file: Path, name: str, found: Scan) -> None:
    """Examine one file. Raises CheckpointError if it is faulty."""
    regular_size(file)
    if file.suffix == ".safetensors":
        safetensors.read(file)
    elif file.name.endswith(".index.json"):
        for shard in sorted(set(safetensors.read_index(file).values())):
            if not (file.parent / shard).is_file():
                found.faults.append(Finding(name, f"names {shard}, which isn't there"))
    elif file.suffix == ".json":
        _look_into_json(file, name, found)
    else:
        pickles = list(scan_file(file, _ranges(file)))
        for pickle in pickles:
            _add(pickle, name, found)
        if not pickles and _starts(file, _COMPRESSED):
            found.remarks.append(
                Finding(name, "is compressed, so its content was not checked; unpack it first")
            )
        if not any(pickle.fault for pickle in pickles):
            _check_structure(file)


def _starts(file: Path, starts: tuple[bytes, ...]) -> bool:
    opened = InputFile.open(file)
    return opened.read(0, min(8, opened.size)).startswith(starts)


def _add(pickle: Pickle, name: str, found: Scan) -> None:
    found.globals += (
        NamedGlobal(name, pickle.place, each, judged) for each, judged in pickle.names.items()
    )
    if pickle.fault:
        found.faults.append(Finding(name, pickle.fault))


def _check_structure(file: Path) -> None:
    """Raises CheckpointError for a torch or GGUF file with misplaced tensors, or for a file that isn't one."""
    if file.name == dcp_metadata.METADATA_NAME:
        dcp_metadata.read(file)
    elif file.suffix == ".gguf":
        gguf_header.read(file)
    elif file.name == "blocks.bin" and (file.parent / "delta.json").is_file():
        return  # the blocks of a patch (megaconv/patches/patch.py) aren't torch's
    elif file.suffix in _OF_TORCH or file.name.startswith("pytorch_model"):
        torch_zip.read(file)  # its error says what the file is instead


def _ranges(file: Path) -> list[tuple[int, int]] | None:
    """(offset, size) of the archives in a `.distcp` file, or of the files in a tar archive; None for other files.

    For a `.distcp` file, the `.metadata` beside it gives the archives.
    """
    if file.suffix in _TARS:
        return sorted(
            (each.offset, each.size)
            for each in tar_archive.read_members(InputFile.open(file)).values()
        )
    if file.suffix != ".distcp":
        return None
    metadata = dcp_metadata.read(file.parent / dcp_metadata.METADATA_NAME)
    places = [chunk.place for tensor in metadata.tensors.values() for chunk in tensor.chunks]
    places += metadata.objects.values()
    return sorted({(place.offset, place.nbytes) for place in places if place.file == file.name})


def _look_into_json(file: Path, name: str, found: Scan) -> None:
    value = read_json(file, RECORD_BYTES)  # the largest size of any JSON file in a checkpoint
    if not isinstance(value, dict):
        return
    named = value.get("auto_map")
    if named:
        what = f"its auto_map has transformers run {json.dumps(named)[:300]} where trust_remote_code is given"
        found.code.append(Finding(name, what))
    for key, kernel in kernels_of_hub(value):
        what = (
            f"its {key} has transformers fetch the kernel {kernel!r:.300} from the Hub and run it"
        )
        found.code.append(Finding(name, what))
