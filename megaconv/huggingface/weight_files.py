"""Named tensors of whole models in safetensors or torch files, with or without an index."""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from formats import safetensors, torch_zip
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.tensor import LazyTensor
from formats.wording import counted, listing
from megaconv.errors import TensorMismatch
from megaconv.families.parts.keys import WEIGHT_NAMES
from megaconv.huggingface.other_files import complete_shards, weights_inside

_log = logging.getLogger("megaconv")

_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+(\.safetensors|\.bin)")
"""File names of parts of a model, to which an index belongs."""
_COUNT = re.compile(r"-\d+-of-(\d{1,9})\.\w+$")
"""The end of the name of such a file, with their number."""
_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def is_weights(path: Path) -> bool:
    """True if a file of a Hugging Face directory holds weights or is their index."""
    return path.name.endswith(_SUFFIXES)


def has_weights(path: Path) -> bool:
    """True if a directory has a weight file with one of the names that transformers looks for."""
    return any((path / name).is_file() for name in WEIGHT_NAMES) or bool(complete_shards(path))


def read_directory(path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The weight file that decides how a Hugging Face directory is read, and every tensor by its name."""
    for name in WEIGHT_NAMES:
        weights = path / name
        if not weights.is_file():
            continue
        if name.endswith(".index.json"):
            return weights, read_sharded(weights)
        index = path / f"{name}.index.json"
        if index.is_file() and not _is_index_of(name, index):
            _log.warning(
                "%s: holds %s and %s, two models; %s is read, as in transformers. Remove the other one",
                path,
                name,
                index.name,
                name,
            )
        return weights, read_file(weights)
    shards = complete_shards(path)
    if not shards:
        raise no_weights(path)
    return shards[0], _read_shards(shards)


def _read_shards(shards: Sequence[Path]) -> dict[str, LazyTensor]:
    """All tensors of a model in several files without an index. Raises TensorMismatch for a name in two of them."""
    found: dict[str, LazyTensor] = {}
    for file in shards:
        tensors = read_file(file)
        twice = found.keys() & tensors.keys()
        if twice:
            raise TensorMismatch(f"{file}: holds {min(twice)}, which another shard holds too")
        found |= tensors
    return found


def _is_index_of(name: str, index: Path) -> bool:
    """True if an index names this file alone, as mlx-lm writes it."""
    try:
        return set(safetensors.read_index(index).values()) == {name}
    except CheckpointError:
        return False


def no_weights(path: Path) -> CorruptCheckpoint:
    """The error for a directory with a config.json, or for that file itself, if weights are needed."""
    if path.is_file():
        what = "is a configuration; give the directory that holds the weights too"
    else:
        what = "has a config.json but no weights" + _found_instead(path)
    return CorruptCheckpoint(f"{path}: {what}", code="missing-file")


def _found_instead(path: Path) -> str:
    """The rest of a message about missing weights: shards without their index, or files of other names."""
    others = sorted(entry.name for entry in path.iterdir() if is_weights(entry))
    shard = next((name for name in others if _SHARD.fullmatch(name)), None)
    if shard is not None:
        index = _SHARD.sub(r"\1\2.index.json", shard)
        return f" that can be found: {index} is missing, which lists {listing(others)}; download it too"
    held = f"; it holds {listing(others)}" if others else ""
    return f"{held}; expected one of {', '.join(WEIGHT_NAMES)}"


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch-saved file of any other name."""
    if path.suffix == ".safetensors":
        return dict(safetensors.read(path))
    value = torch_zip.read(path)
    if not isinstance(value, Mapping):
        found = type(value).__name__
        raise CorruptCheckpoint(f"{path}: expected a dictionary of tensors, found {found}")
    value = weights_inside(value)
    for name, tensor in value.items():
        is_tensor = hasattr(tensor, "read_into")
        if not isinstance(name, str) or not is_tensor:
            raise CorruptCheckpoint(
                f"{path}: {name!r} is not a tensor; expected a dictionary of tensors, or one under a key such as state_dict"
            )
    return dict(value)


def read_sharded(index: Path) -> dict[str, LazyTensor]:
    """All tensors of a model in several files, in the order of its index.

    Raises TensorMismatch if index and files disagree.
    """
    files = safetensors.read_index(index)
    _require_shards(index, sorted(set(files.values())))
    shards = {name: read_file(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise TensorMismatch(
                f"{index}: assigns {name} to {file}, but the file doesn't hold it",
                code="missing-tensor",
            )
    for file, tensors in shards.items():
        _require_placed(tensors, file, files, index)
    return {name: shards[file][name] for name, file in files.items()}


def require_counted(index: Path) -> None:
    """Raise TensorMismatch if an index names fewer files than their names count, such as two of `-of-00003`.

    For a model without a family: nothing else shows that tensors are missing.
    """
    files = set(safetensors.read_index(index).values())
    counts = {int(match[1]) for name in files if (match := _COUNT.search(name))}
    if counts and len(files) < max(counts):
        raise TensorMismatch(
            f"{index}: names {counted(len(files), 'file')} of the {max(counts)} that the names of these files count; copy the whole model",
            code="missing-tensor",
        )


def _require_shards(index: Path, names: Collection[str]) -> None:
    """Raises CorruptCheckpoint if files are missing."""
    missing = [name for name in names if not os.path.exists(index.parent / name)]  # noqa: PTH110
    if missing:
        # Path.exists raises OSError for names that are too long.
        raise CorruptCheckpoint(
            f"{index.parent / missing[0]}: no such file; {index.name} names {counted(len(names), 'file')}, {len(missing)} of them missing: "
            f"{listing(missing)}. Download or copy them too",
            code="missing-file",
        )


def _require_placed(
    tensors: Collection[str], file: str, files: Mapping[str, str], index: Path
) -> None:
    """Raise TensorMismatch for a tensor in a file that the index places elsewhere, or nowhere."""
    for name in tensors:
        if files.get(name) != file:
            raise TensorMismatch(
                f"{index.parent / file}: holds {name}, which {index.name} doesn't place there"
            )
