"""Entries that options of several classes share."""

from pathlib import Path
from typing import Any

from megaconv.options.option import INPUT_AND_OUTPUT
from megaconv.options.values import pairs


def local_checkpoint(given: str | Path) -> Path:
    """A local checkpoint; see best_iteration.local_checkpoint."""
    from megaconv import best_iteration  # it reads files, which --help doesn't

    return best_iteration.local_checkpoint(given)


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
