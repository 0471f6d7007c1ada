"""The options of the converter, each defined once, for the command line and for Python alike.

A field made by `option()` is an option. Add an option to its class: the command line, `--help` and docs/options.md
follow. A test asks for the parameter in `megaconv/api/`.
"""

from megaconv.options.converting import (
    CHECKPOINT_TYPES,
    ConvertOptions,
    checkpoint_types,
    require_workers,
)
from megaconv.options.option import Listed, listed, options_given
from megaconv.options.pushing import PushOptions
from megaconv.options.reading import LoadOptions
from megaconv.options.sealing import SealOptions
from megaconv.options.unused import refuse_unused
from megaconv.options.values import AdapterChoice
from megaconv.options.writing import (
    CALIBRATED,
    DIST_FILES,
    FP8,
    FP8_BLOCK,
    FP8_PER_CHANNEL,
    INT4_AWQ,
    INT8_SQ,
    KV_CACHES,
    LAYOUT_OPTIONS,
    LOSSES,
    MXFP4,
    NVFP4,
    PACKED,
    QUANTIZATIONS,
    W4A8_AWQ,
    W4A16,
    W8A16,
    SaveOptions,
)

__all__ = [
    "CALIBRATED",
    "CHECKPOINT_TYPES",
    "DIST_FILES",
    "FP8",
    "FP8_BLOCK",
    "FP8_PER_CHANNEL",
    "INT4_AWQ",
    "INT8_SQ",
    "KV_CACHES",
    "LAYOUT_OPTIONS",
    "LOSSES",
    "MXFP4",
    "NVFP4",
    "PACKED",
    "QUANTIZATIONS",
    "W4A8_AWQ",
    "W4A16",
    "W8A16",
    "AdapterChoice",
    "ConvertOptions",
    "LoadOptions",
    "PushOptions",
    "SaveOptions",
    "SealOptions",
    "checkpoint_types",
    "options_given",
    "options_of",
    "refuse_unused",
    "require_workers",
]

_CLASSES = (ConvertOptions, PushOptions, SealOptions)


def options_of(command: str) -> dict[str, Listed]:
    """The options of a command by parameter, in the order of `--help`."""
    found = (each for kind in _CLASSES for each in listed(kind, command))
    return {each.option.parameter: each for each in found}
