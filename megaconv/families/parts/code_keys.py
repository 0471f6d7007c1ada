"""Keys of a config.json with which transformers runs code of somebody else."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES_CODE = re.compile(r"_?(attn|experts)_implementation(_internal)?|auto_map|attribute_map")
"""Keys that name code, such as a kernel of the Hub which transformers would fetch and run, or that rename attributes."""


def without_code(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the keys that name code, also in the parts of a multimodal model."""
    return {
        key: without_code(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
        if not _NAMES_CODE.fullmatch(key)
    }


def kernels_of_hub(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, name of a repository of the Hub) for each kernel that transformers would fetch and run."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from kernels_of_hub(value)
        elif _NAMES_CODE.fullmatch(key) and isinstance(value, str) and "/" in value:
            yield key, value
