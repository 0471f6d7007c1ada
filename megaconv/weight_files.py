"""Files of named tensors, safetensors or torch, alone or with an index: read without a look at what the names mean."""

from collections.abc import Mapping
from pathlib import Path

from formats import safetensors, torch_zip
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.errors import TensorMismatch

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def is_weights(path: Path) -> bool:
    """Whether a file of a Hugging Face directory holds weights, or says where they are."""
    return path.name.endswith(_SUFFIXES)


def read_directory(path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The file of a Hugging Face directory that was decisive, and every tensor by its name."""
    for name in _WEIGHTS:
        weights = path / name
        if not weights.is_file():
            continue
        if name.endswith(".index.json"):
            return weights, read_sharded(weights)
        return weights, read_file(weights)
    raise CorruptCheckpoint(f"{path}: has a config.json but no weights; expected one of {', '.join(_WEIGHTS)}")


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of what torch saved under any other name."""
    if path.suffix == ".safetensors":
        return dict(safetensors.read(path))
    value = torch_zip.read(path)
    if not isinstance(value, Mapping):
        raise CorruptCheckpoint(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(name, str) or not hasattr(tensor, "read_into"):
            raise CorruptCheckpoint(f"{path}: {name!r} is not a tensor")
    return dict(value)


def read_sharded(index: Path) -> dict[str, LazyTensor]:
    """All tensors of a model in several files, in the order of its index. Raises TensorMismatch where the two disagree."""
    files = safetensors.read_index(index)
    shards = {name: read_file(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise TensorMismatch(f"{index}: says that {file} holds {name}, which it doesn't")
    for file, tensors in shards.items():
        for name in tensors:
            if files.get(name) != file:
                raise TensorMismatch(f"{index.parent / file}: holds {name}, which {index.name} doesn't place there")
    return {name: shards[file][name] for name, file in files.items()}
