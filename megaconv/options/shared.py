"""Entries that options of several classes share."""

from pathlib import Path
from typing import Any

from megaconv.local_paths import local_path
from megaconv.options.option import INPUT_AND_OUTPUT
from megaconv.options.values import pairs


def local_checkpoint(given: str | Path) -> Path:
    """The local path of a checkpoint, for `RUN/best` that of the best iteration. Raises CheckpointError."""
    from megaconv.best_iteration import with_best  # it reads files, which --help doesn't

    return local_path(with_best(str(local_path(given))))


def tokenizer_place(given: str | Path) -> str:
    """The place of a tokenizer, for `RUN/best` that of the best iteration. Raises CheckpointError."""
    from megaconv.best_iteration import with_best  # it reads files, which --help doesn't

    return with_best(str(given))


CONFIG: dict[str, Any] = {
    "read": local_checkpoint,
    "metavar": "PATH",
    "help": "Hugging Face directory, or Megatron run with hf/, for settings that the source lacks.",
}
OWN_OPTIONS: dict[str, Any] = {
    "heading": INPUT_AND_OUTPUT,
    "python": "options",
    "words": list[str] | None,
    "read": pairs,
    "metavar": "KEY=VALUE",
    "help": "An option of the loader's or the saver's own, as `megaconv formats` lists them; may be repeated.",
}
