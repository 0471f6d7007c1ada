"""Weight files as other programs than transformers leave them: training states with weights inside, shards without an index.

pytorch_model.bin: {"module": {"model.embed_tokens.weight": …}, "epoch": 3}        DeepSpeed, Lightning, training scripts
ft-model-00001-of-00004.safetensors …                                              torchtune, without an index
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INSIDE = ("state_dict", "module", "model", "model_state_dict")
"""Keys of training states under which programs store the weights."""
_OTHERS = ("consolidated", "adapter", "shard-")
"""Beginnings of names of shards of other kinds: Mistral's files, adapters, and files of torch's HuggingFaceStorageWriter."""
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})(?P<kind>\.safetensors|\.bin)"
)


def weights_inside(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The dictionary of tensors in a training state; the value itself if it has none, or more than one."""
    found = [
        value[key]
        for key in _INSIDE
        if isinstance(value.get(key), Mapping) and any(map(_is_tensor, value[key].values()))
    ]
    holds_tensors = any(map(_is_tensor, value.values()))
    return found[0] if len(found) == 1 and not holds_tensors else value


def _is_tensor(value: object) -> bool:
    return hasattr(value, "read_into")


def complete_shards(path: Path) -> list[Path]:
    """All shards of a directory's only sharded model, in order; empty if a shard is missing, or the names are of several models.

    The names of shards count them, so that a complete model needs no index.
    """
    by_model: defaultdict[tuple[str, int, str], list[tuple[int, Path]]] = defaultdict(list)
    for file in path.iterdir():
        match = _SHARD.fullmatch(file.name)
        if match is not None and not file.name.startswith(_OTHERS):
            model = match["stem"], int(match["count"]), match["kind"]
            by_model[model].append((int(match["number"]), file))
    if len(by_model) != 1:
        return []
    (((_, count, _), shards),) = by_model.items()
    numbers = sorted(number for number, _ in shards)
    # The count is compared first: a hostile name may claim any number of shards. A number may occur twice, as 1 and 00001.
    is_complete = len(numbers) == count and numbers == list(range(1, count + 1))
    return [file for _, file in sorted(shards)] if is_complete else []
