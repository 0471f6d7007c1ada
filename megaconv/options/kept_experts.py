"""The experts that an output keeps: the same ones in all layers, or others in each layer.

0-47,60                                                 in all layers
{"keep": {"layers.3": [0, 2, 5], "mtp.0": [1, 2, 7]}}   a JSON file, such as `megatron-lite rank-experts` writes
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from megaconv.errors import CorruptCheckpoint, UsageError
from megaconv.local_paths import local_path
from megaconv.options.values import expert_numbers

KEEP = "keep"
"""The key of such a file under which the experts are."""
EVERYWHERE = "all layers"
"""The entry for experts that are the same in all layers."""
Kept = Mapping[str, Sequence[int]]
"""Layers, such as `layers.3` or `mtp.0` -> the numbers of their experts that stay, in rising order."""
_LAYER = re.compile(r"(layers|mtp)\.\d{1,9}", re.ASCII)


def kept_experts(given: str | Path | Iterable[int] | Mapping[str, Iterable[int]]) -> Kept:
    """The experts that stay.

    given: numbers such as 0-15,24, the path of a file, or these values themselves. Raises UsageError for other text,
    CorruptCheckpoint for a file that can't be read, TypeError for a value of another type.
    """
    if isinstance(given, str) and re.fullmatch(r"[\d\s,-]+", given, re.ASCII):
        return {EVERYWHERE: _rising(expert_numbers(given), given)}
    if isinstance(given, str | Path):
        return _of_file(local_path(given))
    if isinstance(given, Mapping):
        return {layer: _rising(expert_numbers(given[layer]), layer) for layer in given}
    return {EVERYWHERE: _rising(expert_numbers(given), "the list")}


def _rising(found: Sequence[int], where: str) -> tuple[int, ...]:
    """The numbers in rising order. Raises UsageError if one is there twice."""
    if len(set(found)) < len(found):
        raise UsageError(f"{where}: names an expert twice; name each expert once")
    return tuple(sorted(found))


def _of_file(path: Path) -> Kept:
    if not path.is_file():
        raise UsageError(
            f"{path}: is neither a list of experts, such as 0-47,60, nor a file that `megatron-lite rank-experts` wrote"
        )
    from formats.regular_files import read_json  # most commands read no such file

    found = read_json(path, SIDECAR_BYTES)
    layers = found.get(KEEP) if isinstance(found, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise _unlike(path, f'an object "{KEEP}" with the experts of each layer')
    return {layer: _of_layer(layers[layer], layer, path) for layer in layers}


def _of_layer(experts: Any, layer: str, path: Path) -> tuple[int, ...]:
    if not _LAYER.fullmatch(layer):
        raise _unlike(path, f"names such as layers.3 or mtp.0 in place of {layer!r:.80}")
    is_list = isinstance(experts, list) and bool(experts)
    if not is_list or not all(type(each) is int and each >= 0 for each in experts):
        raise _unlike(path, f"a list of numbers from 0 for {layer}")
    return _rising(experts, f"{path}: {layer}")


def _unlike(path: Path, expected: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path}: expected {expected}; write it with `megatron-lite rank-experts`"
    )
