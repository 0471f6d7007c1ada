"""The experts that an output keeps: the same ones in all layers, or others in each layer.

0-47,60                                                 in all layers
{"keep": {"layers.3": [0, 2, 5], "mtp.0": [1, 2, 7]}}   a JSON file, such as `megatron-lite rank-experts` writes
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.options.kept_file import Kept, KeptFile, rising
from megaconv.options.values import expert_numbers

EVERYWHERE = "all layers"
"""The entry for experts that are the same in all layers."""
_FILE = KeptFile(
    part="expert",
    holds="the experts of each layer",
    places=re.compile(r"(layers|mtp)\.\d{1,9}", re.ASCII),
    examples="layers.3 or mtp.0",
    command="megatron-lite rank-experts",
)


def kept_experts(given: str | Path | Iterable[int] | Mapping[str, Iterable[int]]) -> Kept:
    """The experts that stay.

    given: numbers such as 0-15,24, the path of a file, or these values themselves. Raises UsageError for other text,
    CorruptCheckpoint for a file that can't be read, TypeError for a value of another type.
    """
    if isinstance(given, str) and re.fullmatch(r"[\d\s,-]+", given, re.ASCII):
        return {EVERYWHERE: rising(expert_numbers(given), given, _FILE.part)}
    if isinstance(given, str | Path):
        return _of_file(_FILE.path(given))
    if isinstance(given, Mapping):
        return {layer: rising(expert_numbers(given[layer]), layer, _FILE.part) for layer in given}
    return {EVERYWHERE: rising(expert_numbers(given), "the list", _FILE.part)}


def _of_file(path: Path) -> Kept:
    if not path.is_file():
        raise UsageError(
            f"{path}: is neither a list of experts, such as 0-47,60, nor a file that `megatron-lite rank-experts` wrote"
        )
    return _FILE.read(path)
