"""Opens an adapter that peft or mlx-lm saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.adapters.mlx_files import SETTINGS, mlx_config, open_mlx_adapter
from megaconv.adapters.peft_files import (
    CONFIG,
    Adapter,
    AdapterConfig,
    adapter_directory,
    open_peft_adapter,
    peft_config,
)
from megaconv.errors import CorruptCheckpoint, UsageError


def open_adapter(directory: Path) -> Adapter:
    """Open an adapter. Raises CheckpointError if it isn't a complete LoRA adapter or can't be merged."""
    if not directory.is_dir():
        raise UsageError(f"--adapter {directory}: no such directory")
    directory = adapter_directory(directory)
    path = directory / CONFIG
    if not path.is_file():
        raise UsageError(
            f"--adapter {directory}: has no {CONFIG}; expected a directory as peft's save_pretrained leaves it"
        )
    config = read_adapter_config(path)
    if _is_of_mlx(_content(path)):
        return open_mlx_adapter(directory, config)
    return open_peft_adapter(directory, config)


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
