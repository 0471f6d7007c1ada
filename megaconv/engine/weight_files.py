"""The weight files of a directory of Hugging Face's kind: one safetensors file, or several with an index."""

from collections.abc import Mapping, Sequence

from formats.output import FileLayout, PlainFile
from formats.safetensors import index_json, shard
from formats.tensor import LazyTensor, Shape, byte_count
from megaconv.engine.base_model import CompletedTensors, CopiedTensors

_Described = tuple[str, Shape, str]
"""Name, shape and dtype of a tensor."""


def add_weight_files(
    files: dict[str, FileLayout],
    ours: Sequence[_Described],
    max_shard_bytes: int,
    *,
    copied: Mapping[str, LazyTensor] | None = None,
    last_rows: Mapping[str, LazyTensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Add all weight files and their index to `files`. Returns the file of each tensor.

    copied: tensors that come last, in files of their own. last_rows: the last rows of some of our tensors, which are copied
    too. metadata: further entries of the headers of the other files.
    """
    copied = copied or {}
    others = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in copied.items()]
    layouts: list[tuple[Sequence[str], FileLayout]] = []
    for members in shard(ours, max_shard_bytes):
        infos = {name: (shape, dtype) for name, shape, dtype in members}
        layouts.append((tuple(infos), CompletedTensors(infos, last_rows or {}, metadata or {})))
    for members in shard(others, max_shard_bytes) if others else ():
        taken = {name: copied[name] for name, _, _ in members}
        layouts.append((tuple(taken), CopiedTensors(taken)))
    file_of: dict[str, str] = {}
    for number, (names, layout) in enumerate(layouts, start=1):
        file = _file_name(number, len(layouts))
        files[file] = layout
        file_of |= dict.fromkeys(names, file)
    if len(layouts) > 1:
        total = sum(byte_count(shape, dtype) for _, shape, dtype in (*ours, *others))
        files["model.safetensors.index.json"] = PlainFile(index_json(file_of, total))
    return file_of


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
