"""Opens an adapter that peft or mlx-lm saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.adapters.low_rank import FLOATS
from megaconv.adapters.mlx_files import SETTINGS, mlx_config, open_mlx_adapter
from megaconv.adapters.peft_files import (
    CONFIG,
    Adapter,
    AdapterConfig,
    adapter_directory,
    open_peft_adapter,
    peft_config,
    refuse_initialization,
)
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UsageError
from megaconv.families.parts.keys import CONFIG_NAME

_READ_FROM = (*FLOATS, "float64")
"""Dtypes of an adapter's tensors."""


def open_adapter(directory: Path, *, with_base: bool = False) -> Adapter:
    """Open an adapter. Raises CheckpointError if it isn't a complete LoRA adapter or can't be merged.

    with_base: True if the caller has the base's weights, and takes out the parts that PiSSA and OLoRA took out.
    """
    if not directory.is_dir():
        raise UsageError(f"--adapter {directory}: no such directory")
    directory = adapter_directory(directory)
    path = directory / CONFIG
    if not path.is_file():
        is_model = (directory / CONFIG_NAME).is_file()
        found = f"has no {CONFIG}" + (", and is a whole model" if is_model else "")
        raise UsageError(
            f"--adapter {directory}: {found}; expected a directory as peft's save_pretrained leaves it"
        )
    config = read_adapter_config(path)
    if config.initialization and not with_base:
        refuse_initialization(config.initialization, str(path))
    is_of_mlx = _is_of_mlx(_content(path))
    adapter = (open_mlx_adapter if is_of_mlx else open_peft_adapter)(directory, config)
    _require_numbers(adapter)
    return adapter


def _require_numbers(adapter: Adapter) -> None:
    """Raise TensorMismatch for an adapter without tensors, and for matrices and vectors that aren't floating-point."""
    if not adapter.modules and not adapter.replaced and not adapter.tokens:
        raise TensorMismatch(
            f"{adapter.weights}: holds no tensors; copy the adapter again", code="missing-tensor"
        )
    for module in adapter.modules:
        for tensor in (module.a, module.b, module.bias, module.magnitude):
            if tensor is not None and tensor.dtype not in _READ_FROM:
                raise TensorMismatch(
                    f"{adapter.weights}: {module.module} has a tensor of {tensor.dtype}; expected {', '.join(_READ_FROM)}"
                )


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read an adapter_config.json. Raises CorruptCheckpoint, and UnsupportedInput for a setting that can't be merged."""
    raw = _content(path)
    return mlx_config(raw, path) if _is_of_mlx(raw) else peft_config(raw, path)


def _content(path: Path) -> Mapping[str, Any]:
    raw = read_json(path, CONFIG_BYTES)
    if not isinstance(raw, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def _is_of_mlx(raw: Mapping[str, Any]) -> bool:
    return SETTINGS in raw
