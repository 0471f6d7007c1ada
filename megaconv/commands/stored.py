"""Lists the tensors in files under the files' own names, for checkpoints that no loader recognises as a model.

Only metadata of a file is read; no tensor is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from formats import (
    gguf_header,
    orbax_arrays,
    rank_files,
    safetensors,
    tar_archive,
    torch_dist,
    torch_zip,
    zarr_arrays,
)
from formats.ceilings import CONFIG_BYTES
from formats.dcp_metadata import METADATA_NAME
from formats.errors import CorruptCheckpoint
from formats.partial_files import fetch_whole
from formats.pickle_errors import MalformedError
from formats.pickle_guard import check_tree
from formats.pickle_records import Opaque
from formats.regular_files import read_json
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, StridedTensor, byte_count
from formats.wording import counted

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", ".gguf", ".distcp", ".nemo", *TORCH_SUFFIXES)
"""Suffixes of files that may hold tensors."""
_DEEPEST = 64
"""The largest depth of a nested state dict."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, as a file has it."""

    name: str
    shape: Shape
    dtype: str
    nbytes: int
    file: str
    """The file, relative to the examined path."""
    offset: int | None
    """Offset of the tensor in the file in bytes; None if the tensor isn't contiguous."""
    lazy: LazyTensor | None = None
    """The tensor's values; None if numpy can't compute with its dtype."""

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes": self.nbytes,
            "file": self.file,
            "offset": self.offset,
        }


@dataclass(frozen=True)
class Contents:
    """Tensors, and other facts about a file or directory: label -> text."""

    kind: str
    tensors: tuple[StoredTensor, ...]
    facts: Mapping[str, str]


def read_file(path: Path, shown: str | None = None) -> Contents:
    """The content of a file.

    shown: the file's name in messages and lists. Raises CheckpointError for a file that is damaged or of an unknown
    kind.
    """
    name = shown or path.name
    if path.suffix == ".safetensors":
        return _safetensors(path, name)
    if path.suffix == ".gguf" or gguf_header.is_gguf(path):
        return _gguf(path, name)
    if path.suffix == ".distcp":
        return _distcp(path, name)
    if path.suffix == ".nemo":
        return _nemo(path, name)
    value = torch_zip.read(path)
    kind = (
        "a Megatron rank file"
        if isinstance(value, dict) and "checkpoint_version" in value
        else "torch"
    )
    return Contents(kind, tuple(_torch_tensors(value, name)), _rank_facts(value))


def read_directory(path: Path) -> Contents | None:
    """The content of a directory; None if it has no file that may hold tensors. Raises CheckpointError."""
    version = rank_files.find_version(path) or path
    if torch_dist.is_dcp(version):
        return _dcp(version)
    if torch_dist.read_backend(version) == "zarr":
        arrays = zarr_arrays.open_directory(version).tensors()
        tensors = tuple(stored(name, array, name, None) for name, array in arrays.items())
        return Contents("zarr", tensors, {})
    tree = orbax_arrays.find_tree(path)
    if tree is not None:
        return _orbax(tree)
    files = [file for file in _files(path) if file.suffix in SUFFIXES]
    if not files:
        return None
    parts = [read_file(file, str(file.relative_to(path))) for file in files]
    kinds = ", ".join(dict.fromkeys(part.kind for part in parts))
    facts = {label: text for part in parts for label, text in part.facts.items()}
    all_tensors = chain.from_iterable(part.tensors for part in parts)
    return Contents(kinds, tuple(all_tensors), facts)


def _files(path: Path) -> list[Path]:
    """Files of a directory itself, or the rank files of a Megatron checkpoint."""
    version = rank_files.find_version(path)
    if version is not None and rank_files.is_rank_files(version):
        return sorted(version.glob("mp_rank_*/*.pt"))
    return sorted(
        file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
    )


def stored(name: str, tensor: LazyTensor, file: str, offset: int | None) -> StoredTensor:
    shape = tuple(tensor.shape)
    return StoredTensor(
        name, shape, tensor.dtype, byte_count(shape, tensor.dtype), file, offset, tensor
    )


def _safetensors(path: Path, shown: str) -> Contents:
    tensors = safetensors.read(path)
    metadata = {
        f"metadata {name}": text[:200] for name, text in safetensors.read_metadata(path).items()
    }
    found = tuple(stored(name, tensor, shown, tensor.offset) for name, tensor in tensors.items())
    return Contents("safetensors", found, metadata)


def _gguf(path: Path, shown: str) -> Contents:
    header = gguf_header.read(path)
    found = tuple(
        StoredTensor(name, tensor.shape, tensor.dtype, tensor.nbytes, shown, tensor.offset)
        for name, tensor in header.tensors.items()
    )
    facts = {name: str(value) for name, value in header.keys.items() if not isinstance(value, list)}
    facts |= {
        name: counted(count, "item") for name, count in header.lengths.items() if name not in facts
    }
    return Contents(
        f"GGUF version {header.version}", found, {name: text[:200] for name, text in facts.items()}
    )


def _dcp(path: Path, only: str | None = None) -> Contents:
    """The content of a distributed checkpoint. only: a file name, to list only the chunks in this file."""
    metadata = torch_dist.open_directory(path).metadata
    tensors = []
    for name, tensor in metadata.tensors.items():
        chunks = [chunk for chunk in tensor.chunks if only in (None, chunk.place.file)]
        if not chunks:
            continue
        is_one_chunk = len(chunks) == 1
        shape = tuple(tensor.shape)
        nbytes = byte_count(shape, tensor.dtype)
        if only is not None:
            nbytes = sum(byte_count(chunk.shape, tensor.dtype) for chunk in chunks)
            shape = tuple(chunks[0].shape) if is_one_chunk else shape
        files = ", ".join(dict.fromkeys(chunk.place.file for chunk in chunks))
        tensors.append(
            StoredTensor(
                name,
                shape,
                tensor.dtype,
                nbytes,
                files,
                chunks[0].place.offset if is_one_chunk else None,
            )
        )
    objects = [name for name, place in metadata.objects.items() if only in (None, place.file)]
    return Contents(
        "DCP (torch's distributed checkpoint)", tuple(tensors), {"objects": str(len(objects))}
    )


def _distcp(path: Path, shown: str) -> Contents:
    """The content of one `.distcp` file, from its `.metadata`; otherwise its archives in order, without names."""
    if torch_dist.is_dcp(path.parent):
        found = _dcp(path.parent, only=path.name)
        return Contents(f"a file of a {found.kind}", found.tensors, found.facts)
    file = InputFile.open(path)
    tensors = []
    for number, (start, size) in enumerate(_archives(path)):
        value = torch_zip.read_at(file, start, size)
        if isinstance(value, (FileTensor, StridedTensor)):
            tensors.append(stored(f"#{number}", value, shown, getattr(value, "offset", None)))
    facts = {"names": f"are in {METADATA_NAME}, which isn't beside it"}
    return Contents("a .distcp file alone", tuple(tensors), facts)


def _archives(path: Path) -> Iterator[tuple[int, int]]:
    """(start, size) of consecutive zip archives. Each ends with an end record without a comment."""
    end = b"PK\5\6" + bytes(4)
    fetch_whole([path])
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        if data[:4] != b"PK\3\4":
            raise CorruptCheckpoint(f"{path}: should begin with a zip archive, as .distcp files do")
        start, at = 0, data.find(end)
        while at >= 0:
            stop = at + 22
            if data[stop - 2 : stop] == bytes(2) and (
                stop == len(data) or data[stop : stop + 4] == b"PK\3\4"
            ):
                yield start, stop - start
                start = stop
            at = data.find(end, at + 1)


def _nemo(path: Path, shown: str) -> Contents:
    """The tensors in the torch files of an archive, with the names of the members."""
    file = InputFile.open(path)
    members = tar_archive.read_members(file)
    tensors: list[StoredTensor] = []
    for name, (offset, size) in members.items():
        if name.endswith(TORCH_SUFFIXES):
            tensors += _torch_tensors(torch_zip.read_at(file, offset, size), f"{shown}: {name}")
    return Contents("a NeMo archive", tuple(tensors), {"members": f"{len(members):,} files"})


def _orbax(path: Path) -> Contents | None:
    """The parameters of a tree; None if tensorstore isn't installed, which is needed for their shapes."""
    tree = orbax_arrays.read_tree(path)
    names = {name: name for words, name in tree.arrays.items() if words[0] == "params"}
    try:
        arrays = orbax_arrays.open_arrays(tree, names)
    except ImportError:
        return None
    tensors = []
    for name, array in arrays.items():
        shape, dtype = tuple(array.shape), array.dtype.name
        tensors.append(StoredTensor(name, shape, dtype, byte_count(shape, dtype), path.name, None))
    return Contents(
        "Orbax (JAX)", tuple(tensors), {"other arrays": f"{len(tree.arrays) - len(names):,}"}
    )


def _torch_tensors(value: object, file: str) -> Iterator[StoredTensor]:
    """The tensors in nested dictionaries, lists and objects, named by their keys. Each object is entered once."""
    entered = set[int]()
    rest: list[tuple[str, int, object]] = [("", 0, value)]
    while rest:
        prefix, depth, each = rest.pop()
        if isinstance(each, (FileTensor, StridedTensor)):
            yield stored(prefix or "(the file itself)", each, file, each.offset)
            continue
        if isinstance(each, Opaque):
            each = _attributes(each, entered)
        inner: list[tuple[object, object]] = []
        if depth < _DEEPEST and isinstance(each, Mapping):
            inner = list(each.items())
        elif depth < _DEEPEST and isinstance(each, (list, tuple)):
            inner = list(enumerate(each))
        for key, item in reversed(inner):
            rest.append((f"{prefix}.{key}" if prefix else str(key), depth + 1, item))


def _attributes(record: Opaque, entered: set[int]) -> Mapping[Any, Any]:
    """The attributes of an object that wasn't entered before; empty if they can't be walked."""
    if id(record) in entered or not isinstance(record.state, dict):
        return {}
    entered.add(id(record))
    try:
        check_tree(record.state)
    except MalformedError:
        return {}
    return record.state


def _rank_facts(value: object) -> dict[str, str]:
    """Facts about a Megatron rank file."""
    if not isinstance(value, dict):
        return {"holds": f"a {type(value).__name__}, not a dictionary"}
    wanted = ("iteration", "checkpoint_version")
    facts = {name: str(value[name]) for name in wanted if isinstance(value.get(name), (int, float))}
    return facts | (
        {"args": f"{len(vars(value['args']))} of Megatron's arguments"}
        if hasattr(value.get("args"), "__dict__")
        else {}
    )


def adapter_facts(path: Path) -> dict[str, str] | None:
    """Facts from an adapter_config.json of peft or mlx-lm; None without one."""
    file = path / "adapter_config.json"
    if not file.is_file():
        return None
    found = _json_object(file)
    wanted = (
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_dora",
        "use_rslora",
        "bias",
        "target_modules",
        "modules_to_save",
        "fine_tune_type",
        "lora_parameters",
        "num_layers",
    )
    return {name: _short(found[name]) for name in wanted if found.get(name) not in (None, False)}


def config_facts(path: Path) -> dict[str, str]:
    """Facts on the size from a config.json of any architecture; empty without one."""
    file = path / "config.json"
    return facts_of(_json_object(file)) if file.is_file() else {}


def facts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Facts on the size from the content of a config.json."""
    wanted = (
        "architectures",
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "quantization_config",
    )
    return {name: _short(config[name]) for name in wanted if config.get(name) is not None}


def _json_object(file: Path) -> Mapping[str, Any]:
    found = read_json(file, CONFIG_BYTES)
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{file}: should be a JSON object, found a {type(found).__name__}")
    return found


def _short(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(sorted(map(str, value)))[:200]
    return json.dumps(value)[:200] if isinstance(value, dict) else str(value)[:200]
