"""Sizes that a model can't be sharded to, refused before its tensors are looked up: these may be tens of thousands."""

from pathlib import Path
from typing import Any

from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.errors import CheckpointError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.options import LoadOptions, SaveOptions


def refuse_sizes(saver: Any, place: Path | str, load: LoadOptions, save: SaveOptions) -> None:
    """Asks a saver that has `refuse` about the model that a config.json beside the input describes, where there is one.

    Whatever is wrong with that file, who opens the input says better. Raises LayoutError.
    """
    refuse = getattr(saver, "refuse", None)
    directories = [load.config, *([] if isinstance(place, str) else [place, place / SIDECAR_DIRECTORY])]
    found = next((path for path in directories if path is not None and (path / CONFIG_NAME).is_file()), None)
    if refuse is None or found is None:
        return
    config = _described(found, text_only=load.text_only)
    if config is not None:
        refuse(config, save, has_layout=found != place)


def _described(directory: Path, *, text_only: bool) -> ModelConfig | None:
    try:
        _, config = read_config(directory / CONFIG_NAME, text_only=text_only, whole=True)
    except CheckpointError:
        return None
    return config
