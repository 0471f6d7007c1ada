"""Refuses parallel sizes that a model can't have before its tensors, maybe tens of thousands, are looked up."""

from pathlib import Path

from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.errors import CheckpointError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.options import LoadOptions, SaveOptions
from megaconv.saver import Saver


def refuse_sizes(saver: Saver, place: Path | str, load: LoadOptions, save: SaveOptions) -> None:
    """Let the saver's `refuse`, if it has one, check the parallel sizes of the model in a config.json beside the input.

    A damaged config.json is ignored here: the loader reports it with a better message. Raises LayoutError.
    """
    directories = [
        load.config,
        *([] if isinstance(place, str) else [place, place / SIDECAR_DIRECTORY]),
    ]
    found = next(
        (path for path in directories if path is not None and (path / CONFIG_NAME).is_file()), None
    )
    if saver.refuse is None or found is None:
        return
    config = _described(found, text_only=load.text_only)
    if config is not None:
        saver.refuse(config, save, has_layout=found != place)


def _described(directory: Path, *, text_only: bool) -> ModelConfig | None:
    try:
        _, config = read_config(directory / CONFIG_NAME, text_only=text_only, whole=True)
    except CheckpointError:
        return None
    return config
